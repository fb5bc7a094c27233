from tests.procs.conftest import procs

__all__ = ["procs"]
