"""The temporary directory of one run."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import tempfile

from rstar2_megatron.services.owned_directory import make_owned_directory


class RunTemporary:
    """Makes an owned directory the temporary directory of this process and of its later children.

    Libraries leave files there, mostly in processes that a signal ends. The files are removed with the directory.
    """

    def __init__(self) -> None:
        before = tempfile.gettempdir()
        self._before = os.environ.get("TMPDIR")
        # Engines make Unix sockets below it, whose paths have at most 107 characters.
        self.path = make_owned_directory("rs2-", before if len(f"{before}/rs2-abcdefgh/tmpabcdefgh") <= 107 else "/tmp")
        self.path.chmod(0o711)  # programs of the judge run below it with other user ids
        # This cache should survive the run, so it stays in the previous temporary directory, under torch's own name for it.
        user = str(os.getuid())  # of a container, where an id may have no name
        with contextlib.suppress(KeyError, OSError):
            user = getpass.getuser()
        self._compiled = f"{before}/torchinductor_{user}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", self._compiled)
        os.environ["TMPDIR"] = str(self.path)
        tempfile.tempdir = None  # makes tempfile read the environment again

    def remove(self) -> None:
        """Restore the previous temporary directory and remove this one. Safe to call twice."""
        if self._before is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = self._before
        tempfile.tempdir = None
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(self._compiled)  # torch makes it, and on a CPU compiles nothing
