"""Comet may refuse, be unreachable or fail later: training goes on, and an archive has it all."""

import http.server
import json
import threading
import zipfile

import pytest

pytestmark = pytest.mark.rest


class Comet(http.server.BaseHTTPRequestHandler):
    """Comet's side, as far as a run needs it to begin."""

    def answer(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
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


CASES = {  # the server, and what the run says
    "wrong key": (WrongKey, "warning: Comet cannot be reached (CometRestApiException"),
    "full disk": (FullDisk, "Could not send live data to Comet"),
    "refused": (None, "warning: Comet cannot be reached (ConnectionError"),
}


def test_comet_does_not_hold_up_training(trainer):
    """All of them at the same time."""
    runs = {}
    for case, (server, _) in CASES.items():
        address = "http://127.0.0.1:9"  # nobody listens
        if server:
            listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), server)
            threading.Thread(target=listener.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{listener.server_port}"
        env = {"COMET_API_KEY": "k" * 25, "COMET_URL_OVERRIDE": address + "/clientlib/"}
        env["COMET_GET_OR_ADD_EXPERIMENT_RETRY_TOTAL"] = "1"  # the fork has read it before
        runs[case] = trainer.start("--max-steps", 6, name=case, comet=True, env=env)
    for case, (_, message) in CASES.items():
        run = runs[case]
        assert run.wait(100) == 0
        assert message in run.output
        assert "Traceback" not in run.output
        # The records that could not be sent are in an archive, to be uploaded later.
        (archive,) = (trainer.folder / case / "comet").glob("*.zip")
        messages = zipfile.ZipFile(archive).read("messages.json").decode()
        assert messages.count('"metricName":"loss"') >= 6
    # The archive and the folder of the run have the same parameters.
    parameters = json.loads((trainer.folder / case / "parameters.json").read_text())
    assert parameters["parameters_total"] > 0
    found = map(json.loads, messages.splitlines())
    found = [m["payload"]["param"] for m in found if m["type"] == "parameter_msg"]
    found = {p["paramName"]: str(p["paramValue"]) for p in found}  # and words of the command
    assert found.items() >= {name: str(value) for name, value in parameters.items()}.items()


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
    assert "Comet: offline" not in result.output
    for kind in ("metric", "parameter", "graph"):
        assert any(kind in path for path in bodies), kind
