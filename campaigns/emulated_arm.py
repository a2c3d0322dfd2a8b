"""An ARM Python on another machine: Debian's packages and PyPI's wheels for arm64, run by QEMU's user emulation.

Nothing is installed: packages are unpacked into a folder. It needs `qemu-aarch64` or `qemu-aarch64-static` (Debian:
`apt install qemu-user-static`), `dpkg-deb`, and the network. Programs that the emulated Python starts are emulated as
well, since its `sys.executable` is a script that calls QEMU.
"""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
RELEASE, VERSION = "bookworm", "3.11"
PACKAGES = (
    "gcc-12-base", "libbz2-1.0", "libc6", "libcrypt1", "libdb5.3", "libexpat1", "libffi8", "libgcc-s1", "libgomp1",
    "liblzma5", "libncursesw6", "libnsl2", f"libpython{VERSION}-minimal", f"libpython{VERSION}-stdlib", "libreadline8",
    "libsqlite3-0", "libssl3", "libstdc++6", "libtinfo6", "libtirpc3", "libuuid1", f"python{VERSION}",
    f"python{VERSION}-minimal", "zlib1g",
)  # fmt: skip
PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_17_aarch64", "manylinux_2_27_aarch64", "manylinux_2_28_aarch64")
WHEELS = (
    "filelock", "hypothesis", "jinja2", "matplotlib", "numba<0.69", "numpy", "platformdirs", "pytest", "rich",
    "threadpoolctl", "tokenizers", "typer",
)  # fmt: skip


def qemu() -> str | None:
    """The emulator, where it is installed."""
    return shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def unavailable() -> str:
    """Why there is no emulated ARM here; empty where there is."""
    if qemu() is None:
        return "QEMU is not installed (apt install qemu-user-static)"
    if shutil.which("dpkg-deb") is None:
        return "dpkg-deb is not installed"
    try:
        with urllib.request.urlopen(f"{MIRROR}/dists/{RELEASE}/Release", timeout=20):
            return ""
    except (urllib.error.URLError, TimeoutError) as error:
        return f"{MIRROR} cannot be reached ({error})"


def python(folder: Path) -> Path:
    """Sets up an ARM Python with onfoot's dependencies in a folder, and returns the program to call."""
    root, site, program = folder / "root", folder / "site", folder / "python"
    if program.exists():
        return program
    root.mkdir(parents=True)
    with urllib.request.urlopen(f"{MIRROR}/dists/{RELEASE}/main/binary-arm64/Packages.xz") as reply:
        listing = lzma.decompress(reply.read()).decode()
    where = {}
    for entry in listing.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in entry.splitlines() if ": " in line and line[0] != " ")
        where[fields.get("Package")] = fields.get("Filename")
    for package in PACKAGES:
        archive = folder / "package.deb"
        with urllib.request.urlopen(f"{MIRROR}/{where[package]}") as reply:
            archive.write_bytes(reply.read())
        subprocess.run(["dpkg-deb", "-x", str(archive), str(root)], check=True)
    platforms = [option for one in PLATFORMS for option in ("--platform", one)]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *platforms]
    download += ["--python-version", VERSION, "--only-binary", ":all:", "--dest", str(folder / "wheels"), *WHEELS]
    subprocess.run(download, check=True, stderr=subprocess.DEVNULL)
    for wheel in (folder / "wheels").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)
    (site / "sitecustomize.py").write_text(f"import sys; sys.executable = {str(program)!r}\n")
    program.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="$PYTHONPATH:{site}"\n'
        f'exec {qemu()} -L {root} {root}/usr/bin/python{VERSION} "$@"\n'
    )
    program.chmod(0o755)
    return program
