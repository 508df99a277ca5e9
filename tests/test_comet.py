"""Comet may refuse, be unreachable or fail later: one warning, and training goes on."""

import http.server
import json
import threading
import time

import pytest


class Comet(http.server.BaseHTTPRequestHandler):
    """Comet's side, as far as a run needs it to begin."""

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body = self.respond()
        body = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def begins(self) -> bool:
        return any(part in self.path for part in ("add/run", "isAlive", "3d-limits"))

    def respond(self):
        experiment = {"runId": "r", "project_id": "p", "focusUrl": "http://comet/"}
        return 200, experiment | {"version": "3.5.0", "msg": "3.5.0"}

    def log_message(self, *_):
        pass


class WrongKey(Comet):
    def respond(self):
        return 401, {"msg": "Invalid API key", "sdk_error_code": 90212}


class FullDisk(Comet):
    """Takes the experiment, and then has no room for any of its data."""

    def respond(self):
        return super().respond() if self.begins() else (507, {"msg": "Insufficient storage"})


@pytest.mark.parametrize("server", [WrongKey, FullDisk, None])
def test_comet_does_not_hold_up_training(trainer, server):
    address = "http://127.0.0.1:9"  # nobody listens
    if server:
        listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), server)
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{listener.server_port}"
    env = {"COMET_API_KEY": "k" * 25, "COMET_URL_OVERRIDE": address + "/clientlib/"}
    run = trainer.start("--max-steps", 30, comet=True, env=env)
    begin = time.monotonic()
    run.wait_for("Done: 30 steps")
    assert time.monotonic() - begin < 15
    assert run.wait(100) == 0
    assert run.output.lower().count("warning: comet fails") == 1, run.output
    assert "Traceback" not in run.output
    assert "COMET" not in run.output
    # What could not be sent is in an archive, to be uploaded later.
    assert f"comet upload {trainer.folder}/run/comet/*.zip" in run.output
    assert list((trainer.folder / "run" / "comet").glob("*.zip"))


def test_comet_online(trainer):
    bodies = []

    class Recorder(Comet):
        def respond(self):
            bodies.append(self.path)
            return super().respond()

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{listener.server_port}/clientlib/"
    env = {"COMET_API_KEY": "k" * 25, "COMET_URL_OVERRIDE": address}
    result = trainer("--max-steps", 5, comet=True, env=env)
    assert "Comet: http://comet/" in result.output
    for kind in ("metric", "parameter", "graph"):
        assert any(kind in path for path in bodies), kind
