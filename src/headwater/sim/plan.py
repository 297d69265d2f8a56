"""What a seed makes of a run: how large, how busy, how unlucky. Drawn once, so that runs differ in kind."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from headwater.store.compaction import Retention

BUSY_S_MIN, BUSY_S_MAX = 2.0, 6.0
DRILLS_SHARE = 0.25
LANDING_SHARE = 0.2
STEPS_MAX = 400_000
"""How much may happen in a run of the usual length: one that goes on for ever is found by that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The weights are relative: how likely one thing is against the others of its kind."""

    seed: int
    nodes: int
    replicas: int
    vbuckets: int
    busy_s: float
    """How long there are writes and faults, in simulated seconds."""
    keys_per_writer: int
    writers: int
    pipelined: int
    """How many writes a writer may have under way at once."""
    writes: int
    """How many there are in all, about, where nothing holds the writers up."""
    write_weights: dict[str, float] = field(hash=False)
    consumers: int
    landings: int = 0
    """Consumers that land the bucket batch by batch."""
    landing_every_s: tuple[float, ...] = (0.0, 0.1, 0.5)
    """One of these passes from batch to batch."""
    hot_keys: int = 0
    """Keys that are rewritten with hardly a pause, each by a lane of its own."""
    hot_pause_s: float = 0.01
    """Between two writes of such a key, on average."""
    fault_pause_s: float
    fault_weights: dict[str, float] = field(hash=False)
    retention: Retention
    compact_every_s: float
    expiry_every_s: float
    latency_s_max: float
    split_chance: float
    disk_delay_s_max: float

    @property
    def lanes(self) -> int:
        """How many writes of one writer are under way at once."""
        return min(self.pipelined, self.keys_per_writer)

    @property
    def write_pause_s(self) -> float:
        """Between two writes of a lane, on average."""
        return self.busy_s * self.writers * self.lanes / self.writes

    @property
    def steps_max(self) -> int:
        """How much may happen in the run. It goes with its length."""
        return int(STEPS_MAX * max(1.0, self.busy_s / BUSY_S_MAX))

    @classmethod
    def draw(cls, seed: int) -> RunPlan:
        """Most seeds are a mixture of everything. Some are about one thing, which a mixture seldom meets."""
        lands = Random(f"landing/{seed}").random() < LANDING_SHARE
        return cls.landing(seed) if lands else cls._drawn(seed)

    @classmethod
    def _drawn(cls, seed: int) -> RunPlan:
        mixed = cls.mixture(seed)
        return mixed._about_drills() if Random(f"drills/{seed}").random() < DRILLS_SHARE else mixed

    @classmethod
    def landing(cls, seed: int) -> RunPlan:
        """The same cluster and faults with consumers that land, most of them under writers of hot keys.

        One other consumer is left: most of the time of a run is the consumers'.
        """
        random = Random(f"landing plan/{seed}")
        return replace(
            cls._drawn(seed),
            consumers=1,
            landings=random.choice([1, 1, 2]),
            hot_keys=random.choice([0, 2, 4]),
            hot_pause_s=random.choice([0.01, 0.03]),
        )

    def _about_drills(self) -> RunPlan:
        """One node whose vbuckets are rolled back again and again, under consumers that are behind."""
        return replace(
            self,
            nodes=1,
            replicas=0,
            vbuckets=min(self.vbuckets, 2),
            keys_per_writer=5,
            writers=3,
            pipelined=8,
            writes=600,
            write_weights=self.write_weights | {"majority": 0.0, "persist": 0.0},
            consumers=3,
            fault_pause_s=0.4,
            fault_weights=dict.fromkeys(self.fault_weights, 0.0) | {"roll back": 3.0, "kill consumer": 1.0},
            retention=Retention(),
            compact_every_s=10.0,
        )

    @classmethod
    def mixture(cls, seed: int) -> RunPlan:
        """A plan in which anything may happen."""
        random = Random(f"plan/{seed}")
        nodes = random.choice([1, 1, 2, 3, 3, 4])
        replicas = 0 if nodes == 1 else random.randint(1, min(2, nodes - 1))
        forgets = random.random() < 0.4
        return cls(
            seed=seed,
            nodes=nodes,
            replicas=replicas,
            vbuckets=random.choice([1, 2, 2, 4, 8]),
            busy_s=random.uniform(BUSY_S_MIN, BUSY_S_MAX),
            keys_per_writer=random.choice([2, 5, 12]),
            writers=random.randint(1, 3),
            pipelined=random.choice([1, 1, 8]),
            writes=random.choice([150, 300, 600]),
            write_weights={
                "set": 1.0,
                "delete": random.choice([0.0, 0.2, 1.0]),
                "expire": random.choice([0.0, 0.0, 0.3]),
                "get": 0.1,
                "majority": random.choice([0.0, 0.5, 2.0]) if replicas else 0.0,
                "persist": random.choice([0.0, 0.5]) if replicas else 0.0,
            },
            consumers=random.randint(1, 3),
            fault_pause_s=random.choice([0.15, 0.4, 1.0]),
            fault_weights=_fault_weights(random, nodes) | _cluster_weights(seed, nodes),
            retention=Retention(history_s=1, history_bytes=random.choice([0, 400]), purge_age_s=1)
            if forgets
            else Retention(),
            compact_every_s=0.5 if forgets else random.choice([1.0, 10.0]),
            expiry_every_s=random.choice([0.5, 2.0]),
            latency_s_max=random.choice([0.0005, 0.005, 0.1]),
            split_chance=random.choice([0.0, 0.1, 0.6]),
            disk_delay_s_max=random.choice([0.0005, 0.002, 0.02]),
        )


def _fault_weights(random: Random, nodes: int) -> dict[str, float]:
    weights = {
        "settle": random.choice([0.5, 2.0]),
        "kill node": random.choice([0.0, 1.0, 2.0]),
        "stop node": random.choice([0.0, 0.5]),
        "roll back": random.choice([0.0, 2.0, 4.0]),
        "full disk": random.choice([0.0, 0.0, 1.0]),
        "slow disk": random.choice([0.0, 0.5]),
        "kill consumer": random.choice([0.5, 1.0]),
        "cut": random.choice([0.0, 1.0]),
        "cut one way": random.choice([0.0, 0.5]),
        "reset": random.choice([0.0, 1.0]),
        "slow link": random.choice([0.0, 0.5]),
        "create collection": random.choice([0.0, 0.5]),
        "drop collection": random.choice([0.0, 0.3]),
    }
    if nodes > 1:
        # A drill takes what a majority had, so most clusters are without.
        weights |= {"roll back": random.choice([0.0, 0.0, 1.0]), "fail over": random.choice([0.0, 1.0, 3.0])}
        weights |= {"rebalance": random.choice([0.0, 0.5])}
    return weights


def _cluster_weights(seed: int, nodes: int) -> dict[str, float]:
    """Drawn apart, so that all else of a plan is what it was before these came up."""
    random = Random(f"cluster/{seed}")
    weights = {"two operators": random.choice([0.0, 0.0, 1.0, 2.0]), "hold replicas": random.choice([0.0, 0.0, 0.7])}
    return weights if nodes > 1 else dict.fromkeys(weights, 0.0)
