"""In place of a server that imports the libraries: processes are forks of this one, which has them.

For scripts that take `multiprocessing.get_context("forkserver")`.
"""

import multiprocessing

CONTEXT = multiprocessing.get_context("fork")
CONTEXT.set_forkserver_preload = lambda modules: None
multiprocessing.get_context = lambda method=None: CONTEXT
