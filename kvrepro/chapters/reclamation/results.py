"""What the reclamation chapter's tables say: verdicts, the acceptance tests, and the numbers that its prose quotes."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from kvrepro.chapters.reclamation.study import LAYOUTS, POLICIES, bandwidths, gpu_passes
from kvrepro.experiment import claims, judge
from kvrepro.experiment.judge import Facts, Member, NotTestable, Sample

CASES = ("item", "policy", "granularity", "shared", "pattern", "check", "tokens", "repeat", "draw")  # name a row


def verdicts(tables: Mapping[str, pd.DataFrame], model: str, profile: str) -> pd.DataFrame:
    """Verdict of every claim of data/claims/reclamation.yml (`judge.verdicts`).

    tables: the studies by the name under which the claims ask for them. A study that was not run is said so.
    """
    book = claims.load_claims("reclamation")
    return judge.verdicts(book["claims"], lambda claim, _: members(claim, tables), model=model, profile=profile)


def members(claim: Mapping, tables: Mapping[str, pd.DataFrame]) -> list[Member]:
    """Of an exact claim every row, named by what tells rows apart; of others the rows of a prompt as one cluster."""
    if claim["study"] not in tables:
        raise NotTestable(f"the study {claim['study']!r} was not run")
    table, found = tables[claim["study"]], []
    for member in claim.get("members", [{"label": "all"}]):
        where = {**claim.get("where", {}), **member.get("where", {})}
        rows = table[np.logical_and.reduce([table[c] == v for c, v in where.items()])] if where else table
        rows = rows.dropna(subset=[column := member.get("column", claim.get("column"))])
        if rows.empty:
            raise NotTestable(f"no row of {claim['study']!r} has " + ", ".join(f"{c} {v}" for c, v in where.items()))
        values = rows[column].astype(float)
        if claim.get("exact") or member.get("exact"):
            named = rows[[name for name in CASES if name in rows]]
            texts = [", ".join(f"{name} {value}" for name, value in row.items()) for row in named.to_dict("records")]
            found.append(Member(member["label"], Facts(values.set_axis(texts))))
        else:
            clusters = rows.get("item")
            found.append(Member(member["label"], Sample(values.to_frame("a"), clusters=clusters, bounds=None)))
    return found


def acceptance(rows: pd.DataFrame) -> pd.DataFrame:
    """`identity` as the guide's acceptance test reads it: a row per layout, with and without a shared prefix."""
    names = {"repack": "repack", "fill": "hole filling", "storage positions": "hole filling, no position map"}
    return (
        rows[rows.layout.isin(names)]
        .groupby(["layout", "shared"])
        .agg(
            generations=("identical", "size"),
            identical=("identical", "sum"),
            largest_logit_gap=("logit_gap", "max"),
            passes=("passes", "sum"),
            as_predicted=("as_predicted", "mean"),
            blocks_freed=("blocks_freed", "sum"),
            slot_copies=("slot_copies", "sum"),
            shared_slots_touched=("shared_slots_touched", "sum"),
        )
        .rename(index=names)
    )


def identical(rows: pd.DataFrame) -> pd.DataFrame:
    """Token identity by who chose the survivors: a row per budget, with its policies and what came of them."""
    real = rows[(rows.layout != "none") & (rows.layout != "storage positions")]
    groups = real.groupby(["source", "granularity"], sort=False)
    found = groups.agg(
        generations=("identical", "size"), identical=("identical", "sum"), largest_logit_gap=("logit_gap", "max")
    )
    found.insert(0, "policies", groups.policy.agg(lambda names: ", ".join(dict.fromkeys(names))))
    return found.rename_axis(["who", "budget"])


def numbers(frame: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """What the prose may quote, as text: `<claim>` and `<claim>-verdict` of each claim, and the chapter's findings."""
    found = claims.quoted(frame)
    synthetic, arising, identity = tables["synthetic"], tables["arising"], tables["identity"]
    traffic, passes = tables["traffic"], tables["passes"]
    found["block-size"] = f"{synthetic.block_size.iloc[0]}"
    found["lot"] = _percent(synthetic[synthetic.pattern == "random 10%"].share_plain, 1)
    heads = synthetic[synthetic.pattern == "random 10% per head, 8 heads"]
    found["lot-heads"], found["lot-heads-repack"] = _percent(heads.share_plain, 1), _percent(heads.share_repack)
    found["kept"] = f"{arising.kept.min():.0%}"
    for policy in POLICIES:
        mine = arising[arising.policy == policy]
        one = mine[(mine.granularity == "one set") & (mine.kept == arising.kept.min())]
        found[f"plain-{policy}"], found[f"ratio-{policy}"] = _percent(one.share_plain), _percent(one.copies_ratio)
        found[f"emptiest-{policy}"] = _percent(one.copies_emptiest / one.copies_repack)
        heads = mine[mine.granularity == "per head"]
        found[f"head-{policy}"] = _percent(heads[heads.kept == arising.kept.min()].share_repack)
        found[f"head-plain-{policy}"] = _percent(heads[heads.kept == arising.kept.min()].share_plain)
        found[f"half-{policy}"] = _percent(heads[heads.kept == 0.5].share_repack)
    real, control = identity[identity.layout.isin(["repack", "fill"])], identity[identity.layout == "storage positions"]
    found["generations"], found["passes"] = f"{len(real):,}", f"{real.passes.sum():,}"
    found["policies"] = str(real[["source", "policy", "granularity"]].drop_duplicates().shape[0])
    found["prompts"] = str(real["item"].nunique())
    times = tables["latency"]
    fastest = times[times.every == times.every.min()].groupby("layout").token_ms.mean()
    found["timed"] = str(times.every.min())
    found |= {f"ms-{layout}": f"{fastest[layout]:.1f}" for layout in LAYOUTS}
    for layout in ("repack", "fill"):
        found[f"gap-{layout}"] = f"{real[real.layout == layout].logit_gap.max():.1g}"
        for every in (1, 128):
            here = traffic[(traffic.layout == layout) & (traffic.every == every)]
            found[f"{layout}-{every}"] = _percent(here.share, 1)
            found[f"moved-{layout}-{every}"] = _percent(here.copies_per_pass / (here.budget + 1))
    found["control"] = f"{control.identical.sum():.0f} of {len(control)}"
    longest = passes[passes.tokens == passes.tokens.max()].groupby("way").seconds.median()
    found["longest"] = f"{passes.tokens.max():,}"
    held = passes[(passes.tokens == passes.tokens.max()) & (passes.way == "one extra pass")]
    found["longest-share"] = _percent(held.share_of_matrix, 1)
    found["extra-times"] = f"{longest['one extra pass'] / longest['fused attention']:.1f}"
    found["eager-times"] = f"{longest['eager'] / longest['fused attention']:.1f}"
    gpu, measured = gpu_passes(), bandwidths()
    found["gpu-pass"] = _percent(gpu[gpu.tokens == gpu.tokens.max()].share)
    found["gpu-tokens"] = f"{gpu.tokens.max():,.0f}" if len(gpu) else "no value"
    for name in ("copy", "repack", "fill"):
        found[f"bandwidth-{name}"] = f"{measured[name] / 1e12:.1f}" if measured else "no value"
    return found


def _percent(shares: pd.Series, digits: int = 0) -> str:
    return "no value" if shares.dropna().empty else f"{shares.mean():.{digits}%}"
