"""Peers whose contenders want one lock: how their programs are started, each in an environment of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench import environments

__all__ = ["CONTENDING", "Contending"]

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class Contending:
    """A peer for `bench.stock` and `bench.handoff`.

    Attributes:
        name: of its row, with what it is when that is not plain.
        library: its name in `bench.contenders.LIBRARIES`.
        packages: whose versions are worth naming; the first one's environment it runs in.
        many_nodes: whether it is a peer of RedLock; else of Lock.
        polls: seconds between two of its tries, or the middle of that; 0 if it is told.
        stock: whether it sells stock, too.
    """

    name: str
    library: str
    packages: tuple[str, ...]
    many_nodes: bool
    polls: float = 0
    stock: bool = True

    def program(self, what: str) -> tuple[list[str], dict[str, str]]:
        """The command and the variables of its program, ``stock_worker`` or ``handoff_worker``.

        Installs what is missing.

        Raises:
            Unavailable: it cannot be had here.
        """
        if self.library == "node-redlock":
            modules = environments.node_modules("node-redlock")
            return ["node", str(HERE / f"{what}.js")], {"NODE_PATH": str(modules)}
        interpreter = environments.python(self.packages[0])
        return [str(interpreter), "-P", "-m", f"bench.{what}"], {"PYTHONPATH": str(ROOT)}


CONTENDING = (
    Contending("python-redis-lock", "python-redis-lock", ("python-redis-lock", "redis", "hiredis"), False),
    Contending("redlock-ng", "redlock-ng", ("redlock-ng", "redis", "hiredis"), True, 0.2),
    Contending("node redlock", "node-redlock", (), True, 0.2),
    Contending("pottery Redlock", "pottery", ("pottery", "redis", "hiredis"), True, 0.1, False),
)
