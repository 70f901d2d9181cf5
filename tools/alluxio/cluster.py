#!/usr/bin/env python3
"""A whole Alluxio 2.9.6 on this machine, for tests and to try things out: master, worker, S3 proxy and a FUSE mount.

    tools/alluxio/cluster.py start FOLDER [--cache 512MB] [--no-fuse]
    tools/alluxio/cluster.py kill FOLDER worker       # SIGKILL, to see what happens
    tools/alluxio/cluster.py respawn FOLDER worker
    tools/alluxio/cluster.py stop FOLDER

The under-store is FOLDER/ufs, the mount FOLDER/mnt, logs are in FOLDER/logs. Servers listen on 127.0.0.1 alone, on
ports that were free. `start` prints a JSON object with the addresses. Needs a JRE (8, 11 or 17), for the mount also
Debian's fuse3, and the jars: those that `make alluxio` fetches, or those in the folder that ALLUXIO_JARS names.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
START_SECONDS = 90.0
STOP_SECONDS = 3.0
MAIN_CLASSES = {
    "master": "alluxio.master.AlluxioMaster",
    "worker": "alluxio.worker.AlluxioWorker",
    "proxy": "alluxio.proxy.AlluxioProxy",
    "fuse": "alluxio.fuse.AlluxioFuse",
}
HEAP = {"master": "256m", "worker": "384m", "proxy": "384m", "fuse": "512m"}
PORTS = ("master.rpc", "master.web", "job.master.rpc", "job.master.web", "worker.rpc", "worker.web", "proxy.web")
READY_PORT = {"master": "master.web", "worker": "worker.web", "proxy": "proxy.web"}
"""A server opens its web port last."""
LOG4J = """\
log4j.rootLogger=WARN, console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d %p %c{1} %m%n
"""


class ClusterError(Exception):
    """It cannot be started; the message says what to do."""


def jars() -> Path:
    """The folder of Alluxio's jars."""
    named = os.environ.get("ALLUXIO_JARS")
    return Path(named) if named else HERE / "jars"


def why_not(*, fuse: bool = False) -> str | None:
    """What is missing on this machine, and how to get it; None if nothing is."""
    if not any(jars().glob("alluxio-core-server-worker-*.jar")):
        return f"no Alluxio jars in {jars()}: run `make alluxio` (needs Maven), or set ALLUXIO_JARS"
    if shutil.which("java") is None:
        return "no Java: apt-get install openjdk-17-jre-headless"
    if fuse and not Path("/dev/fuse").exists():
        return "no /dev/fuse: start the container with --device /dev/fuse --cap-add SYS_ADMIN"
    if fuse and shutil.which("fusermount3") is None:
        return "no FUSE 3: apt-get install fuse3"
    return None


@dataclass
class Cluster:
    """A cluster in a folder, running or not. `load` finds it again from another process."""

    folder: Path
    cache: str = "512MB"
    """Of the worker, in Alluxio's notation."""
    fuse: bool = True
    dies_with_parent: bool = False
    """Servers end when the thread that started them does."""
    jars: Path | None = None
    ports: dict[str, int] | None = None

    @classmethod
    def load(cls, folder: Path) -> "Cluster":
        """A cluster that was started in `folder`."""
        fields = json.loads((folder / "cluster.json").read_text())
        return cls(**{**fields, "folder": folder.resolve()})

    @property
    def ufs(self) -> Path:
        """The under-store."""
        return self.folder / "ufs"

    @property
    def mount(self) -> Path:
        """Where FUSE shows the root."""
        return self.folder / "mnt"

    @property
    def s3(self) -> str:
        """URL of the root for ttv-train; buckets are the folders in it."""
        return f"alluxio+s3://127.0.0.1:{self._port('proxy.web')}/api/v1/s3"

    @property
    def metrics(self) -> str:
        """The worker's metrics page."""
        return f"http://127.0.0.1:{self._port('worker.web')}/metrics/json/"

    def start(self) -> None:
        """Starts every server. Raises ClusterError."""
        if (missing := why_not(fuse=self.fuse)) is not None:
            raise ClusterError(missing)
        self.folder = self.folder.resolve()
        # A mount whose process was killed stays, and answers nothing.
        subprocess.run(["umount", "-l", str(self.mount)], capture_output=True, check=False)
        for name in ("conf", "logs", "journal", "ufs", "cache", "mnt"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "conf/log4j.properties").write_text(LOG4J)
        self.ports, self.jars = _free_ports(), jars().resolve()
        (self.folder / "cluster.json").write_text(json.dumps(asdict(self), default=str))
        if not any((self.folder / "journal").iterdir()):
            command = [*self._java("256m"), "alluxio.cli.Format", "master"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_SECONDS)
            if done.returncode:
                raise ClusterError(f"formatting the journal failed: {done.stdout}{done.stderr}")
        try:
            self._spawn("master")
            self._wait("master")
            for name in self._names[1:]:
                self._spawn(name)
            for name in self._names[1:]:
                self._wait(name)
        except ClusterError:
            self.stop()
            raise

    def respawn(self, name: str) -> None:
        """Starts a server that was killed, and returns when it answers."""
        self._spawn(name)
        self._wait(name)

    def kill(self, name: str) -> None:
        """SIGKILL to one server."""
        os.kill(self._pid(name), signal.SIGKILL)

    def stop(self) -> None:
        """Unmounts, and ends every server."""
        if self.fuse:
            subprocess.run(["umount", "-l", str(self.mount)], capture_output=True, check=False)
        for name in reversed(self._names):
            self._signal(name, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline and any(map(self.is_alive, self._names)):
            time.sleep(0.1)
        for name in self._names:
            self._signal(name, signal.SIGKILL)

    def is_alive(self, name: str) -> bool:
        """Whether a server's process runs."""
        try:
            state = Path(f"/proc/{self._pid(name)}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, ValueError):
            return False
        return state != "Z"

    @property
    def _names(self) -> list[str]:
        return [name for name in MAIN_CLASSES if name != "fuse" or self.fuse]

    def _port(self, name: str) -> int:
        assert self.ports is not None, "the cluster was not started"
        return self.ports[name]

    def _pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def _signal(self, name: str, number: int) -> None:
        if self.is_alive(name):
            os.kill(self._pid(name), number)

    def _spawn(self, name: str) -> None:
        command = [*self._java(HEAP[name]), MAIN_CLASSES[name]]
        if self.dies_with_parent and shutil.which("setpriv"):
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        with (self.folder / f"logs/{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        (self.folder / f"{name}.pid").write_text(str(process.pid))

    def _wait(self, name: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if not self.is_alive(name):
                break
            if os.path.ismount(self.mount) if name == "fuse" else _answers(self._port(READY_PORT[name])):
                return
            time.sleep(0.1)
        raise ClusterError(f"Alluxio's {name} did not start; see {self.folder}/logs/{name}.log")

    def _java(self, heap: str) -> list[str]:
        opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in ("java.lang", "java.nio", "sun.nio.ch")]
        properties = [f"-D{key}={value}" for key, value in self._properties().items()]
        # Two cores are all that the tests may have: the simple collector and compiler start fastest.
        tuning = [f"-Xmx{heap}", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
        return ["java", *tuning, *opened, *properties, "-cp", f"{self.folder}/conf:{self.jars}/*"]

    def _properties(self) -> dict[str, object]:
        folder = self.folder
        properties: dict[str, object] = {
            "alluxio.home": folder,
            "alluxio.conf.dir": folder / "conf",
            "alluxio.logs.dir": folder / "logs",
            "log4j.configuration": f"file:{folder}/conf/log4j.properties",
            "alluxio.user.hostname": "localhost",
            "alluxio.master.mount.table.root.ufs": self.ufs,
            # The journal in a folder and the metadata in memory: no database, and the master can be restarted.
            "alluxio.master.journal.type": "UFS",
            "alluxio.master.journal.folder": folder / "journal",
            "alluxio.master.metastore": "HEAP",
            "alluxio.master.journal.tailer.shutdown.quiet.wait.time": "100ms",
            "alluxio.worker.tieredstore.levels": 1,
            "alluxio.worker.tieredstore.level0.alias": "SSD",
            "alluxio.worker.tieredstore.level0.dirs.path": folder / "cache",
            "alluxio.worker.tieredstore.level0.dirs.mediumtype": "SSD",
            "alluxio.worker.tieredstore.level0.dirs.quota": self.cache,
            "alluxio.user.block.size.bytes.default": "4MB",
            "alluxio.user.file.writetype.default": "CACHE_THROUGH",
            # A multipart upload needs a user's name, which NOSASL does not give.
            "alluxio.security.authentication.type": "SIMPLE",
            "alluxio.security.authorization.permission.enabled": "false",
            # Nothing is looked up or reported outside this machine.
            "alluxio.master.update.check.enabled": "false",
            "alluxio.fuse.update.check.enabled": "false",
            "alluxio.user.metrics.collection.enabled": "false",
            "alluxio.web.ui.enabled": "false",
            "alluxio.fuse.jnifuse.libfuse.version": 3,
            "alluxio.fuse.mount.alluxio.path": "/",
            "alluxio.fuse.mount.point": self.mount,
        }
        for server in ("master", "worker", "proxy", "job.master"):
            properties[f"alluxio.{server}.hostname"] = "localhost"
        for binding in ("master", "master.web", "worker", "worker.web", "proxy.web"):
            properties[f"alluxio.{binding}.bind.host"] = "127.0.0.1"
        for name, port in (self.ports or {}).items():
            properties[f"alluxio.{name}.port"] = port
        return properties


def _free_ports() -> dict[str, int]:
    listeners = [socket.socket() for _ in PORTS]
    try:
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return {name: listener.getsockname()[1] for name, listener in zip(PORTS, listeners, strict=True)}
    finally:
        for listener in listeners:
            listener.close()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["start", "kill", "respawn", "stop"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("server", nargs="?", choices=list(MAIN_CLASSES))
    parser.add_argument("--cache", default="512MB", help="of the worker; default %(default)s")
    parser.add_argument("--no-fuse", action="store_true", help="without the mount")
    options = parser.parse_args()
    if options.command in ("kill", "respawn") and options.server is None:
        parser.error(f"{options.command} which of {', '.join(MAIN_CLASSES)}?")
    try:
        if options.command == "start":
            cluster = Cluster(options.folder, options.cache, fuse=not options.no_fuse)
            cluster.start()
            mount = str(cluster.mount) if cluster.fuse else None
            print(json.dumps({"ufs": str(cluster.ufs), "mount": mount, "s3": cluster.s3, "metrics": cluster.metrics}))
        elif options.command == "stop":
            Cluster.load(options.folder).stop()
        else:
            getattr(Cluster.load(options.folder), options.command)(options.server)
    except (ClusterError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
