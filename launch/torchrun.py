"""torchrun, which prints the error message of the script once more at the end.

    python launch/torchrun.py --standalone --nproc-per-node 2 02-ddp/train-llm.py --demo

After a mistake of the user, a script prints one sentence, `error: ...`. Then torchrun prints a long
report. Its root cause is often a rank that only waited for the rank with the mistake. launch/run.sh
starts this program. The options and the exit status are those of torchrun.
"""

import os
import re
import signal
import sys
import threading
import traceback

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

# The message may follow a progress bar, which ends with "]".
ERROR = re.compile(rb"(?:^|\])(error: .+)")
# Why a rank is killed by these signals
CAUSES = {
    "SIGKILL": "mostly by the kernel or the cluster, because the memory of the machine was full",
    "SIGBUS": "mostly because the shared memory (/dev/shm) of the container was full",
}


def copy(source: int, screen: int, errors: dict) -> None:
    """Writes all bytes from `source` to the screen, and collects the error messages."""
    line = b""
    in_message = False
    try:
        while data := os.read(source, 65536):
            os.write(screen, data)
            *lines, line = re.split(b"[\r\n]", line + data)
            for complete in lines:
                found = ERROR.search(complete)
                # A message about a wrong flag goes on in lines that are indented.
                in_message = found or (in_message and complete.startswith(b"  "))
                if in_message:
                    message = found[1] if found else complete
                    errors[message] = None  # once, although each rank may print it
    except OSError:  # the screen is gone
        pass
    os.close(source)  # ranks that still write get an error, and do not wait for ever


def run() -> int:
    """Runs torchrun, and returns its exit status."""
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    except ChildFailedError as failed:
        traceback.print_exc()
        for rank, failure in failed.failures.items():
            # torchrun itself ends the other ranks with SIGTERM.
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                name = failure.signal_name()
                cause = CAUSES.get(name, "by a crash in a library or a driver")
                print(f"error: rank {rank} was killed ({name}), {cause}", file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    screen = os.dup(2)
    errors = {}
    source, stream = os.pipe()
    reader = threading.Thread(target=copy, args=(source, screen, errors), daemon=True)
    reader.start()
    os.dup2(stream, 2)  # for torchrun and all ranks
    os.close(stream)
    status = run()
    sys.stderr.flush()
    os.dup2(screen, 2)
    reader.join(timeout=5)  # a process that has survived its rank may hold the stream
    if status and errors:
        messages = b"\n".join(errors).decode(errors="replace")
        print(f"\ntorchrun ended with exit status {status} after:\n{messages}", file=sys.stderr)
    sys.exit(status)
