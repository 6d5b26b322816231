"""The parts compared with queueing theory: M/D/1 and M/M/1 (Pollaczek-Khinchine), M/M/1 with processor sharing (Kleinrock)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from atropos_simulation.events import Clock, Engine, Process, Server

CUSTOMERS = 100_000


def arrivals(clock: Clock, rate: float, come: Callable[[random.Random], None]) -> None:
    """Run CUSTOMERS Poisson arrivals, and 1,000 s more."""
    source = random.Random(1)

    def process() -> Process:
        for _ in range(CUSTOMERS):
            yield source.expovariate(rate)
            come(source)
        yield 1000.0

    clock.run(process())


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_a_server_of_constant_service_has_the_waiting_time_of_m_d_1(load):
    clock = Clock()
    server = Server(clock, lambda: 1.0)
    arrivals(clock, load, lambda source: server.serve(lambda: None))
    assert server.served == CUSTOMERS
    assert server.waited_s / server.served == pytest.approx(load / (2 * (1 - load)), rel=0.04)


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_a_server_of_exponential_service_has_the_waiting_time_of_m_m_1(load):
    clock, service = Clock(), random.Random(2)
    server = Server(clock, lambda: service.expovariate(1.0))
    arrivals(clock, load, lambda source: server.serve(lambda: None))
    assert server.waited_s / server.served == pytest.approx(load / (1 - load), rel=0.06)


def test_two_servers_with_one_queue_have_the_waiting_time_of_m_m_2():
    clock, service = Clock(), random.Random(2)
    server = Server(clock, lambda: service.expovariate(1.0), servers=2)
    arrivals(clock, 1.6, lambda source: server.serve(lambda: None))
    assert server.waited_s / server.served == pytest.approx(0.8**2 / (1 - 0.8**2), rel=0.06)  # Erlang C


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_an_engine_without_a_step_of_its_own_shares_like_m_m_1_ps(load):
    clock, took = Clock(), []
    engine = Engine(clock, 0.0, 1.0, most=10**9)

    def come(source: random.Random) -> None:
        began = clock.now
        engine.sample(source.expovariate(1.0), lambda: took.append(clock.now - began))

    arrivals(clock, load, come)
    assert len(took) == CUSTOMERS
    assert sum(took) / len(took) == pytest.approx(1 / (1 - load), rel=0.06)


def ends(most: int, *lengths: int) -> list[float]:
    clock, found = Clock(), []
    engine = Engine(clock, 0.5, 0.25, most)

    def process() -> Process:
        for length in lengths:
            engine.sample(length, lambda: found.append(clock.now))
        yield 1000.0

    clock.run(process())
    assert engine.tokens == pytest.approx(sum(lengths))
    return found


def test_a_batch_takes_the_sum_of_its_decode_steps():
    assert ends(8, 10) == pytest.approx([10 * 0.75])
    assert ends(8, 10, 20) == pytest.approx([10 * 1.0, 10 * 1.0 + 10 * 0.75])
    assert ends(8, 10, 10) == pytest.approx([10.0, 10.0])


def test_what_does_not_fit_into_a_batch_waits_for_the_first_to_leave():
    assert ends(1, 10, 20) == pytest.approx([7.5, 7.5 + 15.0])


def test_a_paused_engine_keeps_its_sequences_and_makes_no_token():
    clock, found = Clock(), []
    engine = Engine(clock, 0.5, 0.5, 8)

    def process() -> Process:
        engine.sample(10, lambda: found.append(clock.now))
        yield 4.0
        engine.pause()
        yield 100.0
        engine.resume()
        yield 100.0

    clock.run(process())
    assert found == pytest.approx([110.0])
    assert engine.busy_s == pytest.approx(10.0)
