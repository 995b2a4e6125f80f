"""Executes the steps of an image's Dockerfile without Docker, in a Debian that debootstrap made:

    debootstrap --include=ca-certificates,python3,python3-pip,python3-venv,python3-dev,python-is-python3 bookworm ROOT
    python -m tests.docker.in_chroot judge.Dockerfile ROOT [FIRST [LAST]]     as root; steps are counted from 1

FROM is what debootstrap made: Debian 12 as in the images, with its own Python 3.11. COPY takes what git tracks. Variables of
pip in this process's environment, which may name a registry, are passed on.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.docker.test_docker_files import instructions
from tests.e2e.runs import ROOT


@contextmanager
def mounted(root: Path) -> Iterator[None]:
    """`root` as a mount point, like a container's, with the kernel's file systems and the name server of this machine."""
    places = [root, *(root / name for name in ("proc", "dev", "sys"))]
    for place in places:
        source = root if place == root else Path("/", place.name)
        subprocess.run(["mount", "--rbind", str(source), str(place)], check=True)
        subprocess.run(["mount", "--make-rslave", str(place)], check=True)
    (root / "etc/resolv.conf").write_text(Path("/etc/resolv.conf").read_text())
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")  # as Docker writes it
    try:
        yield
    finally:
        subprocess.run(["umount", "-R", "-l", str(root)], check=False)


# The judge refuses its private root in a chroot, so the directory becomes the root of a mount namespace, as a container's does.
_ENTER = 'mount --make-rprivate / && cd "$0" && mkdir -p .old && pivot_root . .old && umount -l /.old && exec sh -c "$1"'


def inside(root: Path, directory: str, environment: dict[str, str], command: str) -> None:
    enter = ["unshare", "--mount", "sh", "-c", _ENTER, str(root), f"cd {directory} && {command}"]
    subprocess.run(enter, check=True, env=environment)


def copy(root: Path, directory: str, words: list[str]) -> None:
    target = (root / directory.lstrip("/") / words[-1]).resolve()
    for source in words[:-1]:
        tracked = subprocess.run(
            ["git", "ls-files", "-z", "--", source], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.split("\0")
        # a folder's contents go into the target, a file keeps its name
        top = ROOT / source if (ROOT / source).is_dir() else (ROOT / source).parent
        for name in filter(None, tracked):
            to = target / (ROOT / name).relative_to(top)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes((ROOT / name).read_bytes())
            to.chmod((ROOT / name).stat().st_mode)


def main() -> None:
    name, root = sys.argv[1], Path(sys.argv[2]).resolve()
    first, last = (int(word) for word in [*sys.argv[3:], *["1", "99"][len(sys.argv) - 3 :]])
    directory = "/"
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "DEBIAN_FRONTEND": "noninteractive",
        "PIP_BREAK_SYSTEM_PACKAGES": "1",  # Debian's Python is the image's here
        **{
            key: value
            for key, value in os.environ.items()
            if key.startswith(("PIP_", "UV_", "SSL_CERT_FILE")) or "proxy" in key.lower()
        },
    }
    with mounted(root):
        for number, (step, words) in enumerate(instructions(name), 1):
            if step in ("ENV", "ARG"):
                environment |= dict(pair.split("=", 1) for pair in shlex.split(words))
            elif step == "WORKDIR":
                directory = words
                (root / directory.lstrip("/")).mkdir(parents=True, exist_ok=True)
            if first <= number <= last and step in ("RUN", "COPY"):
                began = time.monotonic()
                if step == "RUN":
                    inside(root, directory, environment, words)
                else:
                    copy(root, directory, words.split())
                print(f"step {number}: {step} {words[:60]}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
