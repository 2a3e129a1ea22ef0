"""Two nodes on one machine: network namespaces joined by a veth pair, a torchrun agent in each.

    sudo python -m tests.multinode.run

1. Trains on 2 x 2 processes, one pipeline stage per node, each sharded within, and compares with one process.
2. Trains sharded within a node and replicated across, and cuts the link in the middle: ranks and agents of both sides
   must end by themselves, in bounded time, and say where they were.
3. Mends the link and resumes from the last checkpoint: the losses must go on as if nothing had happened.

Ranks end when a collective's timeout is over. An agent asks its store in between, and a write into a dead connection is
given up by the kernel only, after ``tcp_retries2`` attempts: 15 are about a quarter of an hour, the 5 here 13 seconds.

Needs root (or CAP_NET_ADMIN) and the ``ip`` tool.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.launch.common import PROGRAM, ROOT, environment, losses
from tests.launch.program import STEPS

ADDRESSES = ("10.77.5.1", "10.77.5.2")
PROCESSES = 2
"""Per node."""
PORT = 29655
CUT_AFTER = 3
"""Steps."""
TCP_RETRIES = 5
"""Of both namespaces, in place of 15."""
MOST_SECONDS = 60.0
"""From the cut to the end of the last process of both sides."""


@dataclass(frozen=True)
class Node:
    """A network namespace with one end of the pair in it."""

    name: str
    link: str
    address: str


def nodes() -> tuple[Node, Node]:
    """Returns the two nodes; their names carry this process's number, so that two runs do not meet."""
    mark = os.getpid() % 100000
    first, second = (Node(f"pardist{mark}{s}", f"pd{mark}{s}", a) for s, a in zip("ab", ADDRESSES, strict=True))
    return first, second


def is_possible() -> str:
    """Returns why namespaces cannot be made here, or an empty text."""
    if shutil.which("ip") is None:
        return "there is no ip tool"
    name = f"pardistprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return made.stderr.strip() or "ip netns add failed"
    _ip("netns", "del", name)
    return ""


@contextmanager
def network(a: Node, b: Node) -> Iterator[None]:
    """Joins two namespaces by a veth pair for a while."""
    try:
        for node in (a, b):
            _ip("netns", "add", node.name)
        _ip("link", "add", a.link, "netns", a.name, "type", "veth", "peer", "name", b.link, "netns", b.name)
        for node in (a, b):
            _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", node.link)
            _ip("-n", node.name, "link", "set", node.link, "up")
            _ip("-n", node.name, "link", "set", "lo", "up")
            setting = f"echo {TCP_RETRIES} > /proc/sys/net/ipv4/tcp_retries2"
            _ip("netns", "exec", node.name, "sh", "-c", setting)
        yield
    finally:
        for node in (a, b):
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True, check=False)


def set_link(node: Node, state: str) -> None:
    """Brings a node's end of the link ``"up"`` or ``"down"``."""
    _ip("-n", node.name, "link", "set", node.link, state)


@dataclass
class Agent:
    """One torchrun in one namespace."""

    process: subprocess.Popen[str]
    log: Path

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(node: Node, first: Node, folder: Path, attempt: str, *arguments: str) -> Agent:
    """Starts the agent of a node; the first node hosts the rendezvous."""
    command = [
        "ip", "netns", "exec", node.name,
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes=2", f"--nproc_per_node={PROCESSES}", f"--rdzv_id={attempt}", "--rdzv_backend=c10d",
        f"--rdzv_endpoint={first.address}:{PORT}", f"--local_addr={node.address}", "--max_restarts=0",
        # A namespace has no host name of its own, by which the agent would know that the endpoint is here.
        # read_timeout: how long the agent itself waits for an answer from the other side of a link that may be cut.
        f"--rdzv_conf=is_host={'true' if node is first else 'false'},read_timeout=10",
        *PROGRAM, str(folder), f"--devices={PROCESSES}", "--num_nodes=2", *arguments,
    ]  # fmt: skip
    log = folder / f"{attempt}-{node.name[-1]}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(GLOO_SOCKET_IFNAME=node.link),
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    return Agent(process, log)


def train(a: Node, b: Node, folder: Path, attempt: str, limit_s: float, *arguments: str) -> None:
    """Runs both agents to a good end."""
    agents = [start(node, a, folder, attempt, *arguments) for node in (a, b)]
    try:
        _wait(agents, limit_s, attempt)
        for agent in agents:
            if agent.process.returncode:
                raise SystemExit(f"{attempt}: an agent failed\n{agent.text()}")
    finally:
        for agent in agents:
            agent.kill()


def cut(a: Node, b: Node, folder: Path, limit_s: float, timeout_s: float) -> float:
    """Cuts the link in the middle of a training; returns the seconds until all processes of both sides have ended."""
    pace = ("--seconds_per_step=0.5", f"--timeout={timeout_s}")
    agents = [start(node, a, folder, "cut", *pace) for node in (a, b)]
    try:
        deadline = time.monotonic() + limit_s
        while _steps(folder) < CUT_AFTER:
            if time.monotonic() > deadline or any(agent.process.poll() is not None for agent in agents):
                raise SystemExit("the training did not get as far as the cut\n" + "\n".join(g.text() for g in agents))
            time.sleep(0.2)
        set_link(b, "down")
        started = time.monotonic()
        _wait(agents, MOST_SECONDS, "cut")
        seconds = time.monotonic() - started
        for node, agent in zip((a, b), agents, strict=True):
            if agent.process.poll() == 0:
                raise SystemExit(f"the agent of {node.name} ended well without its peer")
            said = [line for line in agent.text().splitlines() if "pardist: " in line]
            if not any(f"rank {rank} is at " in line for line in said for rank in range(2 * PROCESSES)):
                raise SystemExit(f"nobody on {node.name} said where it was\n{agent.text()}")
            print(f"  {node.name[-1]}: {said[0]}")
        return seconds
    finally:
        for agent in agents:
            agent.kill()


def check(folder: Path, reference: dict[int, float], what: str) -> None:
    """Compares what every rank noted with one process."""
    for rank in range(2 * PROCESSES):
        found = losses(folder, rank)
        worst = max(abs(found[step] - loss) / loss for step, loss in reference.items())
        if found.keys() != reference.keys() or worst > 1e-5:
            raise SystemExit(f"{what}: rank {rank} noted {found}, one process {reference}")
    print(f"  {what}: {len(reference)} losses on {2 * PROCESSES} ranks equal those of one process (worst {worst:.1e})")


def main() -> int:
    """Runs all three parts; returns 0 if all went as they should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one part")
    parser.add_argument("--timeout", type=float, default=10.0, help="of collectives after the cut")
    options = parser.parse_args()
    if why := is_possible():
        print(f"skipped: network namespaces cannot be made here ({why})")
        return 0
    a, b = nodes()
    with tempfile.TemporaryDirectory(prefix="pardist-multinode-") as root, network(a, b):
        one, whole, broken = (Path(root) / name for name in ("one", "whole", "broken"))
        for folder in (one, whole, broken):
            folder.mkdir()
        command = [sys.executable, *PROGRAM, str(one), "--one_process"]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=options.limit, capture_output=True)
        reference = losses(one, 0)
        print(f"2 nodes x {PROCESSES} processes")
        train(a, b, whole, "pipeline", options.limit, "--stages=2")
        check(whole, reference, "one stage per node, sharded within")
        seconds = cut(a, b, broken, options.limit, options.timeout)
        print(f"  link cut after step {CUT_AFTER}: all processes of both sides ended {seconds:.0f} s later")
        set_link(b, "up")
        train(a, b, broken, "resumed", options.limit, "--resume")
        check(broken, reference, "sharded within, replicated across, cut and resumed")
    return 0


def _steps(folder: Path) -> int:
    path = folder / "losses-0.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _wait(agents: list[Agent], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    for agent in agents:
        try:
            agent.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{what}: an agent did not end in {limit_s:.0f} s\n{agent.text()}") from None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


if __name__ == "__main__":
    assert STEPS > CUT_AFTER + 1
    sys.exit(main())
