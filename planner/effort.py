"""How long and how wide the planner searches: every limit of its searches, with its default.

Limits are counted, never timed, so that a plan is a function of the problem and the effort. `USUAL` is the default
everywhere; other efforts serve tests and ablations.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class OrderEffort:
    """Limits of the search over orders. Work is counted in nodes looked at, some tens of nanoseconds each.

    Attributes:
        search_work: of the exact search over all nodes; 0: there is none.
        window_work: of the exact search of each window size around the peak.
        move_work: of moving single nodes across the peak; 0: none moves.
        whole: the most nodes that the exact search takes together.
        windows: sizes of the windows around the peak, in nodes, in turn.
        tiny: the most nodes whose orders are enumerated where no rule of dominance holds.
        tiny_work: of that enumeration.
        memory: bytes for the sets of nodes that an exact search remembers.
        width: nodes on each side of the peak that may move across it.
        hardest: steps of an order, those with the most bytes, from which its lower bound is computed.
        readers: the most nodes that are compared with one node to see whether it may wait.
    """

    search_work: int = 1_000_000
    window_work: int = 200_000
    move_work: int = 3_000_000
    whole: int = 4096
    windows: tuple[int, ...] = (1024, 256, 64)
    tiny: int = 10
    tiny_work: int = 50_000_000
    memory: int = 1 << 25
    width: int = 48
    hardest: int = 16
    readers: int = 64


@dataclass(frozen=True)
class SequenceEffort:
    """Limits of the annealing of sequences of runs, in small problems.

    Attributes:
        actions: the most actions of a problem whose sequences are annealed; 0: none are.
        points: schedules whose orders are searched before it.
        patience: sweeps in vain that end the search over gaps before it.
        slots: steps of bytes, each with its cheapest sequence, from no recomputation down to the lower bound.
        passes: rounds, after each of which the workers share their sequences.
        workers: threads; the sequences found do not depend on the number of processors.
        ceilings: limits of bytes tried in every pass, evenly on a logarithmic scale.
        attempts: tries in every pass to go below the lowest sequence.
        lower: the last ceiling, as a share of the lowest sequence.
        trials: changes of a sequence for each ceiling and action.
        work: runs looked at in all, which limits the trials.
        room: the longest sequence, in lengths of the order.
        hot: the first temperature, as a share of the cost without recomputation.
        price: of the bytes of an average value at one step, in temperatures.
    """

    actions: int = 200
    points: int = 8
    patience: int = 4
    slots: int = 2048
    passes: int = 4
    workers: int = 2
    ceilings: int = 24
    attempts: int = 12
    lower: float = 0.95
    trials: int = 100
    work: int = 20_000_000
    room: int = 3
    hot: float = 0.1
    price: float = 0.5


@dataclass(frozen=True)
class RecomputeEffort:
    """Limits of the search for schedules that recompute or copy. Work is counted in actions of the schedules
    evaluated, some tens of nanoseconds each.

    Attributes:
        all_orders: the most actions of a problem in which every order gets the long search.
        shares: n for each share 1/n of the whole cost at which the lowest schedule is wanted; 0: at any cost.
        exact: the most actions of a problem in which every byte is counted.
        small: n: the smallest values, together 1/n of all bytes, are always kept.
        step: n: the peak falls from one target to the next by 1/n.
        coarse_step: the same where there are many gaps.
        many: a problem has many gaps if it has more than this.
        lowest: n: the last target is 1/n of the first.
        long: the most actions times gaps of a problem in which values are dropped one by one.
        aims: shares of the peak, in 256ths, above which bytes count when a value is chosen, in turn.
        boost: growth of an old score in each round, in 256ths.
        hope: the most times that a gap may turn out better than estimated.
        batches: batches dropped in vain that end a coarse descent.
        coarse_work: of a coarse descent.
        descent_work: of a descent value by value.
        polish_work: of ruining and recreating schedules.
        short_work: the same in a short search.
        polish_pair: the same for each pair of an action and a gap.
        sweeps: the most sweeps of ruining and recreating.
        patience: sweeps without success that end it.
        targets: about the number of targets that one sweep visits.
        rounds: tries at each target in a sweep.
        eager: times as many tries at a cost that is asked for.
        tries: dropped values that each try considers to keep.
        workers: threads; the schedules found do not depend on the number of processors.
        reordered: steps, in all, of the schedules whose orders are searched.
        candidates: the most schedules of a curve whose steps are given candidates.
        notable: n: a fall of the cost by 1/n makes a point of a curve.
        sequences: limits of annealing.
    """

    all_orders: int = 100
    shares: tuple[int, ...] = (100, 20, 5, 2, 1, 0)
    exact: int = 200
    small: int = 200
    step: int = 512
    coarse_step: int = 64
    many: int = 5000
    lowest: int = 16
    long: int = 5_000_000
    aims: tuple[int, ...] = (252, 230, 128, 64)
    boost: int = 260
    hope: float = 1.5
    batches: int = 12
    coarse_work: int = 300_000_000
    descent_work: int = 20_000_000
    polish_work: int = 200_000_000
    short_work: int = 4_000_000
    polish_pair: int = 3000
    sweeps: int = 200
    patience: int = 24
    targets: int = 170
    rounds: int = 2
    eager: int = 8
    tries: int = 16
    workers: int = 2
    reordered: int = 4_000
    candidates: int = 160
    notable: int = 20_000
    sequences: SequenceEffort = field(default=SequenceEffort())


@dataclass(frozen=True)
class PlacementEffort:
    """Limits of placement. Work is counted in buffers and sections looked at, several hundred millions a second.

    Attributes:
        work: of the systematic search by `place` alone: some tenths of a second.
        layout_work: of the systematic search for a plan; 0: neither it nor ejection.
        parts_work: of the systematic search for the largest buffers by themselves.
        loose: n, in turn: values of at least 1/n of the bound may leave their alias sets.
        quadratic: the most buffers for placers of quadratic work.
        skyline: the most buffers for the skyline, and for all that takes longer.
        searched: the most buffers for the systematic search.
        few: the most buffers that go to the systematic search at once.
        pairs: the most pairs of buffers that live together in a large problem that is placed greedily.
        fewer: numbers of the largest buffers placed by themselves where all can be searched, in turn.
        largest: the same where all cannot be searched.
        less: n: 1/n of the work of shaking, mending and dives goes to each loosened form.
        dives: the most buffers of a core for dives; 0: there are none.
        dive_pair: work of all dives for each pair of buffers that live together: some five to ten of them.
        dive_work: the most of that.
        dive_failures: that end a dive.
        dive_noise: thousandths of the choices changed at random in all but the first two.
        shaking: work of placing by shaken orders; 0: there are none.
        shake: work that each shaken order counts beside its buffers.
        ejected: the most buffers for the ejection search.
        ejection: ends of buffers that one run of it looks at.
        ejection_pair: the same for each pair of buffers that live together.
        ejections: work of all its runs at each capacity, in turn.
        ejections_of_parts: the same where the largest buffers are placed by themselves.
        mending: work of lowering a placement by chains of ejection, or the work of `place` if that is more.
        mending_large: the same for more buffers than the skyline takes, where `stretches` do not help.
        stretches: percents of the highest live set, in turn: buffers that live with as many bytes go before others.
        stretch: work of mending at each of these levels; there are none if one run of chains takes more.
        stretch_large: the same for more buffers than the skyline takes.
        crowd_room: share of the highest live set that a step at it counts as free when buffers are weighed there.
        crowd_power: power of its free share by which a step counts less.
        chains: work of chains before all buffers are pushed up or down.
        chains_pair: the same for each pair of buffers that live together.
        chains_most: the most of both.
        pushed: the most pairs of a problem whose buffers are pushed up and down.
        chain_steps: of the first chains before they are taken back.
        mend_step: n: the next capacity is 1/n of the way from the height to the goal lower.
        mend_turns: how often chains and pushes take turns at one capacity.
        mend_fails: capacities tried in vain, each half as far away as the last, before turns become twice as long.
        failures: that end a run of the systematic search in the first round; twice as many in each further round.
        noise: thousandths of the choices changed at random in later rounds.
        guided_failures: that end a run that follows a placement, in turn.
        guided_noise: thousandths of its choices changed at random, in turn.
        first_share: work of one try in the first round of lowering a placement.
        guided_shares: work of a guided try, in such shares.
        parts: n, in turn: a guided try asks for 1/n less above the bound.
    """

    work: int = 60_000_000
    layout_work: int = 100_000
    parts_work: int = 100_000
    loose: tuple[int, ...] = (200, 1_000_000_000, 50)
    quadratic: int = 20_000
    skyline: int = 5_000
    searched: int = 600
    few: int = 40
    pairs: int = 100_000_000
    fewer: tuple[int, ...] = (20, 40, 60, 80, 100, 150, 200, 300)
    largest: tuple[int, ...] = (450, 400, 350, 300, 250, 200, 150, 100, 500, 550, 600)
    less: int = 8
    dives: int = 2_000
    dive_pair: int = 16_000
    dive_work: int = 3_000_000_000
    dive_failures: int = 64
    dive_noise: int = 50
    shaking: int = 60_000_000
    shake: int = 2_000
    ejected: int = 2_000
    ejection: int = 1_000_000
    ejection_pair: int = 5
    ejections: tuple[int, ...] = (20_000_000, 5_000_000, 5_000_000)
    ejections_of_parts: tuple[int, ...] = (2_000_000,)
    mending: int = 100_000_000
    mending_large: int = 800_000_000
    stretches: tuple[int, ...] = (97, 95, 93, 90, 85, 80, 70, 0)
    stretch: int = 40_000_000
    stretch_large: int = 100_000_000
    crowd_room: float = 0.1
    crowd_power: int = 3
    chains: int = 20_000_000
    chains_pair: int = 20
    chains_most: int = 150_000_000
    pushed: int = 50_000_000
    chain_steps: int = 300
    mend_step: int = 7
    mend_turns: int = 8
    mend_fails: int = 5
    failures: int = 64
    noise: int = 300
    guided_failures: tuple[int, ...] = (64, 128, 256)
    guided_noise: tuple[int, ...] = (100, 30, 10)
    first_share: int = 1 << 24
    guided_shares: int = 16
    parts: tuple[int, ...] = (8, 16)

    def lessened(self) -> PlacementEffort:
        """For each of several forms of a placement."""
        fewer = {name: getattr(self, name) // self.less for name in ("shaking", "mending", "dive_pair", "dive_work")}
        return replace(self, **fewer)


@dataclass(frozen=True)
class Effort:
    """How long the planner searches.

    Attributes:
        order: limits of the search over orders.
        recompute: limits of the search for schedules that recompute or copy.
        placement: limits of placement.
    """

    order: OrderEffort = field(default=OrderEffort())
    recompute: RecomputeEffort = field(default=RecomputeEffort())
    placement: PlacementEffort = field(default=PlacementEffort())


USUAL = Effort()
# One search less each: the heuristics before it stand alone.
WITHOUT = {
    "order search": Effort(order=OrderEffort(search_work=0, window_work=0, move_work=0)),
    "placement search": Effort(placement=PlacementEffort(layout_work=0, shaking=0)),
    "annealing": Effort(recompute=RecomputeEffort(sequences=SequenceEffort(actions=0))),
}
