"""What the tests of SDKs share: the real service, and TCP proxies that hold bytes back."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = os.environ.get("BIN", str(ROOT / "target/debug/opledger"))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until(condition, what, seconds=30):
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"waited in vain for {what}")
        time.sleep(0.05)


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Ledger:
    """`opledger dev` on one directory and one port: killed and started again, it finds its data."""

    def __init__(self, config, environment=None):
        self.directory = tempfile.TemporaryDirectory(prefix="opledger-sdk-")
        path = pathlib.Path(self.directory.name)
        # PostgreSQL gives up root's rights, and has to reach its data.
        path.chmod(0o755)
        self.config = path / "opledger.toml"
        self.config.write_text(config)
        self.data = path / "data"
        self.log = path / "log"
        self.environment = {**os.environ, **(environment or {})}
        self.port = free_port()
        self.process = None
        self.start()

    def start(self):
        arguments = [BIN, "dev", "--dir", self.data, "--config", self.config, "--json"]
        arguments += ["--listen", f"127.0.0.1:{self.port}"]
        self.process = subprocess.Popen(
            arguments, env=self.environment, stdout=subprocess.PIPE, stderr=self.log.open("ab"), text=True
        )
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError("the service did not start:\n" + self.log.read_text())
        self.ready = json.loads(line)
        self.url = self.ready["url"]
        self.key = self.ready["keys"]["agent"]

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired as late:
            self.kill()
            raise AssertionError("the service did not stop:\n" + self.log.read_text()) from late
        self.process.stdout.close()
        self.directory.cleanup()

    def operation(self, operation_id):
        request = urllib.request.Request(
            f"{self.url}/v1/operations/{operation_id}",
            headers={"Authorization": f"Bearer {self.ready['keys']['operator']}"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)


def keys_in(sent):
    """The Idempotency-Key of every request in what was sent."""
    return [key.decode() for key in re.findall(rb"(?i)\r\nidempotency-key: *([^\r]+)\r\n", sent)]


class Gate:
    """A TCP proxy. While it is shut, what comes back from the target is kept; everything that passed is recorded."""

    def __init__(self, target_port):
        self.target_port = target_port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.open = threading.Event()
        self.lock = threading.Lock()
        self.forget()
        threading.Thread(target=self._accept, daemon=True).start()

    def shut(self):
        self.open.clear()

    def reopen(self):
        self.open.set()

    def forget(self):
        """Opens it, and begins another record."""
        self.open.set()
        with self.lock:
            self.sent = b""
            self.received = b""

    def close(self):
        self.open.set()
        self.listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            try:
                target = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._pump, args=(client, target, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(target, client, True), daemon=True).start()

    def _pump(self, source, sink, back):
        kept = b""
        try:
            # Short, so that what is kept is let go soon after the gate opens.
            source.settimeout(0.02 if back else None)
            while True:
                try:
                    piece = source.recv(65536)
                    if not piece:
                        break
                    self._record(piece, back)
                    kept += piece
                except TimeoutError:
                    pass
                if kept and (not back or self.open.is_set()):
                    sink.sendall(kept)
                    kept = b""
            if back:
                self.open.wait()
            sink.sendall(kept)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _record(self, piece, back):
        with self.lock:
            if back:
                self.received += piece
            else:
                self.sent += piece
