"""Run by three ranks: they gather values, and go on together after one of them has failed. At the
end rank 2 is silent."""

import json
import sys

import jax

from autopar.errors import ProfileError
from autopar.measure.profile.rank_group import RankFailure, RankGroup


def fail_in_rank_one(group: RankGroup, *, late: bool) -> None:
    """`late`: the others have finished, and do not wait for it inside."""
    if group.rank == 1:
        raise ValueError("no memory")
    if not late:
        group.slowest(1.0)


def main() -> None:
    jax.distributed.initialize()
    group = RankGroup(wait_s=60)
    seen = {"gathered": group.gather(["of", group.rank]), "slowest": group.slowest(group.rank / 8)}
    seen["first"] = group.from_first({"next": "that"} if group.rank == 0 else None)
    for late in (False, True):
        try:
            group.together(lambda late=late: fail_in_rank_one(group, late=late))
        except RankFailure as error:
            seen[f"failure {late}"] = str(error)
    seen["together"] = group.together(lambda: group.slowest(float(group.rank)))
    group._wait_s = 1.0
    if group.rank != 2:
        try:
            group.gather(None)
        except ProfileError as error:
            seen["silence"] = str(error)
    print("SEEN", json.dumps(seen))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
