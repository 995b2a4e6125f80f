"""The temporary directory of one run."""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile

from rstar2_megatron.services.owned_directory import make_owned_directory


class RunTemporary:
    """Makes one owned directory the temporary directory of this process and of all that it starts from now on.

    Libraries leave files in the temporary directory, most of all those of processes that a signal ends. Here they go
    with the run.
    """

    def __init__(self) -> None:
        before = tempfile.gettempdir()
        self._before = os.environ.get("TMPDIR")
        self.path = make_owned_directory("rs2-")
        self.path.chmod(0o711)  # snippets of the judge run under user ids of their own, below it
        # A cache that is to survive the run stays where torch would have it.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{before}/torchinductor_{getpass.getuser()}")
        os.environ["TMPDIR"] = str(self.path)
        tempfile.tempdir = None  # asks the environment again

    def remove(self) -> None:
        """Back to the temporary directory of before, and this one removed. Safe to call twice."""
        if self._before is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = self._before
        tempfile.tempdir = None
        shutil.rmtree(self.path, ignore_errors=True)
