from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from epl.errors import LaunchError
from epl.launch.machines import MachineLostError, Machines, StoppedError, listen
from epl.launch.outcome import Cause
from epl.launch.stop import StopRequest

CAUSE = Cause(1, 2, 3, "failed", "detail", 4.0, False, "logs")


def together(*actions: Callable[[], object]) -> list[object]:
    """What each action returned or raised, all run at once."""
    results: list[object] = [None] * len(actions)

    def run(number: int) -> None:
        try:
            results[number] = actions[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def pair() -> tuple[Machines, Machines]:
    store = HashStore()
    return Machines(store, 0, 2, StopRequest()), Machines(store, 1, 2, StopRequest())


def test_an_attempt_on_two_machines() -> None:
    zero, one = pair()
    assert together(lambda: zero.agree({"n": "2"}), lambda: one.agree({"n": "2"})) == [None, None]
    assert together(lambda: zero.meet(0, "1234"), lambda: one.meet(0, None)) == ["1234", "1234"]
    assert not zero.is_down(0)
    assert together(lambda: zero.exchange(0, None), lambda: one.exchange(0, CAUSE)) == [[CAUSE], [CAUSE]]
    assert zero.is_down(0)
    assert not zero.is_down(1)
    assert together(zero.leave, one.leave) == [None, None]


def test_different_options_are_refused_on_both() -> None:
    zero, one = pair()
    for result in together(
        lambda: zero.agree({"--gpu_per_worker": "2", "--max_restarts": "0"}),
        lambda: one.agree({"--gpu_per_worker": "4", "--max_restarts": "0"}),
    ):
        assert isinstance(result, LaunchError)
        assert "--gpu_per_worker: machine 0 has 2, machine 1 has 4; start all machines alike" in str(result)


def test_the_same_rank_twice_is_refused() -> None:
    store = HashStore()
    store.add("joined/1", 1)
    with pytest.raises(LaunchError, match="two launchers say --machine_rank 1"):
        Machines(store, 1, 2, StopRequest()).agree({})


def test_a_silent_machine_is_lost() -> None:
    store, now = HashStore(), [0.0]
    machines = Machines(store, 0, 2, StopRequest(), clock=lambda: now[0])
    store.add("beat/1", 1)
    machines.is_down(0)
    now[0] = 59.0
    store.add("beat/1", 1)
    machines.is_down(0)
    now[0] = 118.0
    machines.is_down(0)
    now[0] = 121.0
    with pytest.raises(MachineLostError, match="machine 1"):
        machines.is_down(0)


def test_ctrl_c_is_heard_while_waiting() -> None:
    import signal

    stop = StopRequest()
    stop.signal = signal.SIGINT
    with pytest.raises(StoppedError):
        Machines(HashStore(), 0, 2, stop).agree({})


def test_a_taken_port_is_named_and_a_free_one_is_found() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} of 127.0.0.1 is taken.*another port"):
            listen("127.0.0.1", port)
    with listen("127.0.0.1", 0) as free:
        assert free.getsockname()[0] == "127.0.0.1"
    with listen("192.0.2.1", 0) as everywhere:  # an address that this machine does not have
        assert everywhere.getsockname()[0] == "0.0.0.0"
