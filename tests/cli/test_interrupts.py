"""Waiting for another thread, which an interrupt can end."""

import threading

import pytest

from jaxinfer.cli.interrupts import in_thread


def test_another_threads_result_is_returned():
    assert in_thread(threading.get_ident) != threading.get_ident()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_another_threads_exception_is_raised_with_its_origin(error):
    def fail():
        raise error("why")

    with pytest.raises(error, match="why") as caught:
        in_thread(fail)
    assert caught.traceback[-1].name == "fail"
