"""An error that a thread learns of, raised in the main thread wherever that is."""

import logging
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from qload.errors import ArgumentError, QloadError

log: logging.Logger = logging.getLogger("qload")

WAKE = getattr(signal, "SIGUSR1", signal.SIGINT)
STUCK_S = 10  # a main thread that has not come back from native code by then ends with the process
ENDING_S = 5  # for which a launcher's SIGTERM waits while an error is on its way out


class Interrupt:
    """Within the block, `tell(error)` of any thread raises `error` in the main thread.

    By a signal, so that waiting ends; a main thread that waits in native code, as for a collective of NCCL,
    cannot be reached, and then the process ends once the error is logged. SIGTERM, by which launchers end the
    ranks that are left, waits until the error has come out. ArgumentError outside of the main thread.
    """

    def __init__(self) -> None:
        self.error: QloadError | None = None
        self._since = 0.0
        self._known, self._done = threading.Event(), threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise ArgumentError("joined_world", "a call in the main thread", threading.current_thread().name)
        self._before = {WAKE: signal.signal(WAKE, self._raise), signal.SIGTERM: signal.SIG_DFL}
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
        if error is not None:
            self._since = time.monotonic()
        self.restore_signals()

    def restore_signals(self) -> None:
        """Restore the signal handlers from before the block; SIGTERM waits while an error propagates.

        A handler in Python cannot end a main thread that waits in native code; the default one can.
        """
        signal.signal(WAKE, self._before[WAKE])
        if self.error is None:
            signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])

    def finish(self) -> None:
        """Raise nothing from here on: the main thread is on its way out."""
        self._done.set()

    def tell(self, error: QloadError) -> None:
        """Raise `error` in the main thread, from any other."""
        if self._done.is_set():
            return
        self.error, self._since = error, time.monotonic()
        self._known.set()
        threading.Thread(target=self._reach, name="qload-interrupt", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Until an error is told, for so long at most."""
        self._known.wait(seconds)

    def _reach(self) -> None:
        main = threading.main_thread().ident
        if main is not None and not self._done.is_set():
            signal.pthread_kill(main, WAKE)
        if not self._done.wait(STUCK_S):
            log.critical("%s", self.error)
            os._exit(1)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.error is not None and not self._done.is_set():
            raise self.error

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """A launcher ends this rank: the error that made it do so comes first."""
        if not self._done.is_set() and self._known.wait(ENDING_S) and self.error is not None:
            raise self.error
        if self.error is not None and time.monotonic() - self._since < ENDING_S:
            return
        signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)
