"""A file that cannot be written: its name, the reason, the free space there and the remedy in one sentence."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_REASONS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO)
# By torch's and safetensors' writers, whose errors are no OSErrors. torch does not say why it could not write.
_OTHER_WRITERS = ("unexpected pos", "failed writing file", "I/O error")


class NotWritten(OSError):
    """`filename` could not be written; `strerror` has the reason and the free space there. Pickled as any OSError."""

    def __str__(self) -> str:
        return f"could not write {self.filename}: {self.strerror}"


def not_written(path: str | Path, number: int | None = None) -> NotWritten:
    """The error for a file that could not be written, with the reason of `errno`'s number where one is known."""
    there = nearest_existing(Path(path).parent)
    reason = os.strerror(number) if number else "is the disk full?"
    return NotWritten(errno.EIO, f"{reason} ({shutil.disk_usage(there).free / 1e6:.0f} MB are free there)", str(path))


def nearest_existing(path: str | Path) -> Path:
    """`path`, or the nearest directory above it that is there."""
    absolute = Path(path).absolute()
    return next(place for place in (absolute, *absolute.parents) if place.exists())


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raises NotWritten for an error of the block that the disk is the reason of; such errors do not name their file."""
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        by_disk = number in _REASONS or any(words in str(error) for words in _OTHER_WRITERS)
        if not by_disk or isinstance(error, NotWritten):
            raise
        raise not_written(path, number) from error


def reason_of(error: BaseException, directory: str | Path, key: str) -> str:
    """What the user reads of an error. `key` sets `directory`, that of the results, which stands for a file without a name."""
    if not isinstance(error, NotWritten):
        if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            return str(error)
        file = error.filename2 or error.filename or Path(directory) / "a file"
        error = not_written(file, error.errno)
    return (
        f"{error}. Checkpoints and rows that were written before are whole: make room there, or set {key} to another disk, "
        "and start the same command again"
    )
