"""Which connection is closed for a new one, compared with the rule written out plainly."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from atropos_http_server.connection_limits import Gate, Peer

MOST = 6


class Client:
    is_surplus = False

    def __init__(self, peer: Peer, closed: list[Client]) -> None:
        self.peer, self.closed = peer, closed

    def make_way(self) -> None:
        self.closed.append(self)


class Plain:
    """Those that are open, in the order in which they came, and of those that wait for their client since which event."""

    def __init__(self) -> None:
        self.open: list[Client] = []
        self.waits: dict[Client, tuple[bool, int]] = {}  # it has spoken, and since when

    def largest(self) -> list[Peer]:
        counts = Counter(client.peer for client in self.open)
        return [peer for peer, count in counts.items() if count == max(counts.values())]

    def next_to_go(self, newest: Client) -> Client | None:
        waiting = [client for client in self.waits if client is not newest]
        preferred = [client for client in waiting if client.peer in self.largest()]
        return min(preferred or waiting, key=self.waits.__getitem__, default=None)

    def leave(self, client: Client) -> None:
        self.open.remove(client)
        self.waits.pop(client, None)


@pytest.mark.parametrize("seed", range(100))
def test_the_one_that_makes_way_is_of_who_has_the_most_and_has_waited_for_longest(seed: int):
    chance, gate, plain, closed = random.Random(seed), Gate(60.0, MOST), Plain(), list[Client]()
    for event in range(150):
        if not plain.open or chance.random() < 0.4:
            came = Client(chance.randrange(3), closed)
            plain.open.append(came)
            plain.waits[came] = (False, event)
            expected = plain.next_to_go(came) if len(plain.open) > MOST else None
            one_has_the_most = len(plain.largest()) == 1
            gate.enter(came)
            if one_has_the_most:  # else any of those
                assert closed == ([] if expected is None else [expected])
            assert came.is_surplus == (len(plain.open) > MOST and expected is None)
            while closed:
                plain.leave(closed.pop())
            continue
        client = chance.choice(plain.open)
        match chance.randrange(5):
            case 0:
                gate.await_head(client)
                if plain.waits.get(client, (True, 0))[0]:
                    plain.waits[client] = (False, event)
            case 1:
                if plain.waits.get(client, (True, 0))[0]:  # else its head has just come, and waits no more
                    gate.serve(client)
                gate.await_body(client)
                plain.waits[client] = (True, event)
            case 2:
                gate.serve(client)
                gate.rest(client)
                plain.waits[client] = (True, event)
            case 3:
                gate.serve(client)
                plain.waits.pop(client, None)
            case 4:
                gate.leave(client)
                plain.leave(client)
