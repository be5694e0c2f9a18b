import os
import signal

import pytest

from streamh2o.runs.interrupt import Interrupt, Stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_to_stop_and_the_second_has_its_plain_effect(number):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), number)
        assert interrupt.requested
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert signal.getsignal(number) == signal.SIG_DFL
    assert signal.getsignal(number) == before


def test_waiting_is_cut_off_at_once():
    with Interrupt() as interrupt:
        with pytest.raises(Stopped), interrupt.waiting():
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        with pytest.raises(Stopped), interrupt.waiting():
            pytest.fail("waits again although it was asked to stop")


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupt.requested
    finally:
        signal.signal(signal.SIGHUP, before)
