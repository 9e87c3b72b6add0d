"""Carries out deploy/Dockerfile where there is no container engine, and tries the images as containers would run them.

sudo .venv/bin/python -m tools.replay_dockerfile            # both images; a few minutes, 3 GB in build/replay
sudo .venv/bin/python -m tools.replay_dockerfile broker     # without Java and PySpark

The Dockerfile is parsed, not repeated here: an instruction that this does not know is an error. A Debian bookworm made
by `debootstrap` with Debian's Python 3.11 stands in for the base image. Steps run in a chroot with the network, pip's
settings and the certificates of this machine. The images then run with namespaces of their own (files, processes,
network), the root file system read-only, as the image's user, without capabilities, and with the environment that
docker-compose.yml gives the broker. Needs root, debootstrap and util-linux; the package mirror is that of this
machine's apt.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/replay"
BASE = WORK / "base"
BASE_IMAGE = re.compile(r"python:3\.11(\.\d+)?-slim-bookworm")
# debootstrap does not find who provides python3.11-distutils.
BASE_PACKAGES = "python3.11,python3.11-venv,python3-distutils,ca-certificates"
BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CARRIED_OUT = {"RUN", "COPY", "ENV", "WORKDIR", "USER", "ENTRYPOINT", "CMD", "HEALTHCHECK"}
NOTED = {"VOLUME", "EXPOSE", "STOPSIGNAL"}  # they mean something to an engine only
USER = "10001:10001"
READY_SECONDS = 60
# Listening on all addresses, the pages are for who has logged in; that they say so shows that their files are there.
LOCKED_PAGE = """
import urllib.error, urllib.request
try:
    answer = urllib.request.urlopen("http://127.0.0.1:7680/", timeout=10)
except urllib.error.HTTPError as error:
    answer = error
print(answer.status, answer.headers.get_content_type())
"""
# What a step may know of this machine: how packages are fetched.
PASSED = re.compile(r"(PIP_|SSL_|REQUESTS_CA|CURL_CA)\w*|\w+_proxy|\w+_PROXY")
PASSED_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs")


class ReplayError(Exception):
    """The Dockerfile cannot be replayed, or an image does not do what it should."""


@dataclass(frozen=True, slots=True)
class Step:
    keyword: str
    text: str


@dataclass(slots=True)
class Stage:
    name: str
    base: str
    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True)
class Image:
    """Result of a stage: a folder, and how to run what is in it."""

    root: Path
    environ: dict[str, str]
    folder: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)


# -- the Dockerfile ------------------------------------------------------------------------------------------


def parse(text: str) -> dict[str, Stage]:
    """The stages by name, in their order; raises ReplayError."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    stages: dict[str, Stage] = {}
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        keyword, _, rest = line.strip().partition(" ")
        if keyword == "FROM":
            match = re.fullmatch(r"(\S+)(?: AS (\S+))?", rest)
            if match is None:
                raise ReplayError(f"FROM {rest} is not understood")
            name = match[2] or str(len(stages))
            stages[name] = Stage(name, match[1])
        elif keyword not in CARRIED_OUT | NOTED:
            raise ReplayError(f"the instruction {keyword} is not understood")
        elif not stages:
            raise ReplayError(f"{keyword} comes before FROM")
        else:
            list(stages.values())[-1].steps.append(Step(keyword, rest.strip()))
    return stages


def build(stages: dict[str, Stage], name: str, built: dict[str, Image]) -> Image:
    """Carry out a stage and those it stands on, each once."""
    if name in built:
        return built[name]
    stage = stages[name]
    if stage.base in stages:
        parent = build(stages, stage.base, built)
        image = Image(parent.root, dict(parent.environ), parent.folder, parent.user)
    elif BASE_IMAGE.fullmatch(stage.base):
        image = Image(BASE, {"PATH": BASE_PATH})
    else:
        raise ReplayError(f"nothing stands in for the image {stage.base}")
    for step in stage.steps:
        match = re.search(r"--from=(\S+)", step.text)
        if step.keyword == "COPY" and match:
            build(stages, match[1], built)
    started = time.monotonic()
    root = WORK / name
    run("rm", "-rf", str(root))
    run("cp", "-a", "--reflink=auto", str(image.root), str(root))
    image.root = root
    for step in stage.steps:
        carry_out(step, image, built)
    print(f"stage {name}: {time.monotonic() - started:.0f} s", flush=True)
    built[name] = image
    return image


def carry_out(step: Step, image: Image, built: dict[str, Image]) -> None:
    match step.keyword:
        case "RUN":
            run_in(image, step.text)
        case "COPY":
            copy(step.text, image, built)
        case "ENV":
            for pair in shlex.split(step.text):
                key, _, value = pair.partition("=")
                image.environ[key] = re.sub(r"\$(\w+)", lambda found: image.environ.get(found[1], ""), value)
        case "WORKDIR":
            image.folder = step.text
            inside(image, step.text).mkdir(parents=True, exist_ok=True)
        case "USER":
            image.user = step.text
        case "ENTRYPOINT":
            image.entrypoint = json.loads(step.text)
        case "CMD":
            image.command = json.loads(step.text)
        case "HEALTHCHECK":
            image.healthcheck = json.loads(step.text.partition("CMD ")[2])


def copy(text: str, image: Image, built: dict[str, Image]) -> None:
    words = text.split()
    options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    *sources, goal = [word for word in words if not word.startswith("--")]
    if unknown := options.keys() - {"from", "chmod"}:
        raise ReplayError(f"COPY does not know {', '.join(unknown)}")
    to = inside(image, goal if goal.startswith("/") else f"{image.folder}/{goal}")
    for source in sources:
        path = inside(built[options["from"]], source) if "from" in options else ROOT / source
        if path.is_dir():
            # Links stay links: the environment's interpreter is one.
            ignored = None if "from" in options else shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(path, to, symlinks=True, dirs_exist_ok=True, ignore=ignored)
        else:
            to.parent.mkdir(parents=True, exist_ok=True)
            copied = Path(shutil.copy(path, to))
            copied.chmod(int(options.get("chmod", "0644"), 8))


def run_in(image: Image, command: str) -> None:
    """One RUN, as root, in namespaces of its own for files and processes."""
    passed = {key: value for key, value in os.environ.items() if PASSED.fullmatch(key)}
    mounts = ["mount -t proc proc proc", "mount --rbind /dev dev"]
    for name in PASSED_FILES:
        if Path(name).exists():
            place = inside(image, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.mkdir(exist_ok=True) if Path(name).is_dir() else place.touch()
            mounts.append(f"mount --bind {name} .{name}")
    environ = {**passed, **image.environ, "HOME": "/root"}
    inner = ["/bin/sh", "-ec", f"cd {shlex.quote(image.folder)}\n{command}"]
    script = "\n".join(
        [f"cd {image.root}", *mounts, "exec chroot . " + shlex.join(with_environ(environ, inner))]
    )
    run("unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-ec", script)


# -- containers ----------------------------------------------------------------------------------------------


class Container:
    """A process in the image: its own files, processes and network; nothing to write to but volumes and /tmp."""

    def __init__(
        self,
        image: Image,
        volumes: dict[str, Path],
        environ: dict[str, str],
        *,
        command: Sequence[str] = (),
        beside: Container | None = None,
    ) -> None:
        """`command` replaces the image's CMD; with `beside` another container's network is shared."""
        self._image = image
        self._environ = {**image.environ, **environ, "HOME": "/data"}
        # As an engine does: the names of this machine, and nobody else's.
        hosts = WORK / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {os.uname().nodename}\n")
        mounts = [
            f"mount --bind {image.root} {image.root}",
            f"cd {image.root}",  # only now: a folder entered before lies below the mount
            "mount -t proc proc proc",
            "mount --rbind /dev dev",
            "mount -t tmpfs -o size=2g,mode=1777,nosuid,nodev tmpfs tmp",
            f"mount --bind {hosts} etc/hosts",
            *(f"mount --bind {folder} .{place}" for place, folder in volumes.items()),
            "mount -o remount,bind,ro .",
            "ip link set lo up" if beside is None else ":",
        ]
        started = self._as_user([*image.entrypoint, *(command or image.command)])
        script = "\n".join([*mounts, "exec chroot . " + shlex.join(started)])
        spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        if beside is None:
            spaces.append("--net")
        else:
            spaces = ["nsenter", "--target", str(beside.pid), "--net", *spaces]
        self._process = subprocess.Popen([*spaces, "/bin/sh", "-ec", script])

    @property
    def pid(self) -> int:
        """Of its first process, as this machine counts."""
        parent = self._process.pid
        return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])

    def execute(self, *command: str, check: bool = True) -> str:
        """Run a command in it, and return what it printed."""
        entered = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--root", "--wd"]
        done = subprocess.run(
            [*entered, *self._as_user(command)], capture_output=True, text=True, check=False, timeout=600
        )
        if check and done.returncode != 0:
            raise ReplayError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-2_000:]}")
        return done.stdout

    def wait_healthy(self) -> None:
        """Until the image's own health check succeeds."""
        until = time.monotonic() + READY_SECONDS
        last: Exception | None = None
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise ReplayError(f"the broker ended with {self._process.returncode}")
            try:
                self.execute(*self._image.healthcheck)
            except (ReplayError, IndexError) as error:  # it has no process yet, or is not ready
                last = error
                time.sleep(0.5)
                continue
            return
        raise ReplayError(f"the broker did not become ready: {last}")

    def wait(self, seconds: float) -> int:
        """Its exit status."""
        return self._process.wait(seconds)

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        os.kill(self.pid, signal.SIGTERM)
        return self.wait(60)

    def kill(self) -> None:
        if self._process.poll() is None:
            # Its first process, and all that are with it: `--kill-child` does not reach who changed its user.
            with contextlib.suppress(IndexError, ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()

    def _as_user(self, command: Sequence[str]) -> list[str]:
        user, group = self._image.user.split(":")
        drop = ["setpriv", "--reuid", user, "--regid", group, "--clear-groups", "--no-new-privs"]
        dropped = [*drop, "--bounding-set=-all", "--inh-caps=-all", *command]
        return with_environ(self._environ, dropped, folder=self._image.folder)


def try_broker(broker: Container) -> None:
    """It is healthy, closed, and delivers."""
    broker.wait_healthy()
    print("the health check succeeds", flush=True)
    if broker.execute("id", "-u").strip() != "10001":
        raise ReplayError("the broker does not run as 10001")
    for place in ("/opt/postdate/x", "/usr/x", "/etc/x", "/x"):
        if broker.execute("sh", "-c", f"touch {place} && echo written", check=False):
            raise ReplayError(f"{place} could be written")
    if broker.execute("python", "-c", LOCKED_PAGE).strip() != "403 text/html":
        raise ReplayError("the pages are not locked, or not in the image")
    broker.execute("postdate", "produce", "orders", "--payload", "close order 17", "--delay", "2s")
    started = time.monotonic()
    consume = ("postdate", "consume", "orders", "billing", "--from", "earliest", "--count", "1")
    got = broker.execute(*consume, "--idle", "20s")
    if "close order 17" not in got:
        raise ReplayError(f"the message did not arrive: {got!r}")
    print(f"a message was produced, and consumed {time.monotonic() - started:.1f} s later", flush=True)
    broker.execute("postdate", "produce", "orders", "--payload", "in a day", "--delay", "1d")


def try_jobs(image: Image, broker: Container, volumes: dict[str, Path]) -> None:
    """The night's work on a Spark master and worker, beside the broker whose network they share."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    environ = {"SPARK_LOCAL_HOSTNAME": "localhost"}
    daemons = []
    try:
        for name in ("spark-master", "spark-worker"):
            command = [word.replace("spark-master", "localhost") for word in compose[name]["command"]]
            daemons.append(
                Container(
                    image,
                    volumes,
                    {**environ, **compose[name]["environment"]},
                    command=command,
                    beside=broker,
                )
            )
        environ |= {"SPARK_MASTER": "spark://localhost:7077", "POSTDATE_ADDRESS": "127.0.0.1:7650"}
        started = time.monotonic()
        nightly = Container(image, volumes, environ, beside=broker)
        daemons.append(nightly)
        if status := nightly.wait(300):
            raise ReplayError(f"the nightly work ended with {status}")
        print(f"backup, audit on Spark and compaction: {time.monotonic() - started:.0f} s", flush=True)
    finally:
        for daemon in daemons:
            daemon.kill()


# -- the rest ------------------------------------------------------------------------------------------------


def inside(image: Image, path: str) -> Path:
    return image.root / path.lstrip("/")


def with_environ(environ: dict[str, str], command: Sequence[str], *, folder: str = "/") -> list[str]:
    return [
        "/usr/bin/env",
        f"--chdir={folder}",
        "-i",
        *(f"{key}={value}" for key, value in environ.items()),
        *command,
    ]


def run(*command: str) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise ReplayError(f"{shlex.join(command)[-2_000:]} ended with {done.returncode}")


def debootstrap() -> None:
    """Make the stand-in for the base image, once."""
    if (BASE / ".made").exists():
        return
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Identifier: Packages"],
        capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    mirrors = [line.split()[0] for line in targets if line.endswith(" bookworm")]
    started = time.monotonic()
    run("rm", "-rf", str(BASE))
    BASE.mkdir(parents=True)
    run("debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(BASE), *mirrors[:1])
    # The base image's Python is called so, and lies there.
    for name in ("python", "python3"):
        (BASE / "usr/local/bin" / name).symlink_to("/usr/bin/python3.11")
    (BASE / ".made").touch()
    print(f"debootstrap: {time.monotonic() - started:.0f} s", flush=True)


def replay(names: Sequence[str]) -> None:
    debootstrap()
    stages = parse((ROOT / "deploy/Dockerfile").read_text())
    built: dict[str, Image] = {}
    images = {name: build(stages, name, built) for name in names}
    volumes = {}
    for place in ("/data", "/reports"):
        volumes[place] = WORK / f"volume{place.replace('/', '-')}"
        run("rm", "-rf", str(volumes[place]))
        volumes[place].mkdir()
        os.chown(volumes[place], *map(int, USER.split(":")))
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    environ = {
        # Compose fills in variables: ${NAME:-what else}.
        key: re.sub(r"\$\{(\w+):-(.*?)\}", lambda found: os.environ.get(found[1], found[2]), value)
        for key, value in compose["broker"]["environment"].items()
    }
    broker = Container(images["broker"], {"/data": volumes["/data"]}, environ)
    try:
        try_broker(broker)
        if "jobs" in images:
            try_jobs(images["jobs"], broker, volumes)
        if status := broker.stop():
            raise ReplayError(f"the broker ended with {status}")
    finally:
        broker.kill()
    print("the broker stopped with status 0", flush=True)


def main() -> None:
    started = time.monotonic()
    names = sys.argv[1:] or ["broker", "jobs"]
    if os.geteuid() != 0:
        sys.exit("replay: chroot and namespaces need root: sudo .venv/bin/python -m tools.replay_dockerfile")
    if missing := [
        name for name in ("debootstrap", "unshare", "nsenter", "ip") if shutil.which(name) is None
    ]:
        sys.exit(f"replay: install {', '.join(missing)} first")
    if "broker" not in names:
        sys.exit("replay: name broker, or broker and jobs")
    try:
        replay(names)
    except ReplayError as error:
        sys.exit(f"replay: {error}")
    print(f"replay: {' and '.join(names)} work ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
