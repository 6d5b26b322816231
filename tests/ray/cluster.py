"""A Ray cluster of simulated machines in a process of its own: `python tests/ray/cluster.py` prints its address, then obeys lines on its
standard input: `remove NAME`, `add NAME CPUS`. It ends with its input."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

STORE_BYTES = 100 << 20  # the least that Ray takes


def main() -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "resources": {"head": 1}, "object_store_memory": STORE_BYTES},
    )
    nodes = {}

    def add(name: str, cpus: str) -> None:
        nodes[name] = cluster.add_node(num_cpus=int(cpus), resources={name: 1}, object_store_memory=STORE_BYTES)

    try:
        add("first", "1")
        add("second", "1")
        print(cluster.address, flush=True)
        for line in sys.stdin:
            what, name, *rest = line.split()
            if what == "remove":
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            else:
                add(name, *rest)
            print(what, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
