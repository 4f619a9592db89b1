"""The Dask side: what runs inside the scheduler and the workers.

Read in the order of the data flow: ``scheduler`` (the plugin: hooks, handlers, who is where), ``saves`` (a version from its
first block to its commit), ``worker`` (capture, flush, commit and reads on a worker), ``recovery`` (a lost block comes back).
``messages`` are what crosses processes, ``internals`` is the only module that touches what Dask does not promise to keep.
"""

from veloc_dask.scheduler_plugin.scheduler import VelocPlugin
from veloc_dask.scheduler_plugin.worker import load_block

__all__ = ["VelocPlugin", "load_block"]
