"""Key scorers against float64 transcriptions in plain loops, and independence of rotation, blocks and dead slots;
scorers that look only at positions."""

import math
from dataclasses import replace

import pytest
import torch
from observations import observation, other_rubbish

from kvrepro.engine.score import keys, learned
from kvrepro.errors import InputError
from studies import calibrate

DIM = 8
OUTPUT = observation(seed=9).output
SPEED = torch.tensor([1.0, 0.3, 0.05, 0.002])


def close(scores, expected, alive, tolerance=2e-5):
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores).all()
    torch.testing.assert_close(scores[alive].double(), expected[alive], rtol=tolerance, atol=tolerance)


def each_head(o):
    """(row, head, alive slots, their keys in float64)."""
    for b in range(o.keys.shape[0]):
        for g in range(o.keys.shape[1]):
            slots = o.alive[b, g].nonzero()[:, 0].tolist()
            yield b, g, slots, [o.keys[b, g, j].double() for j in slots]


def rotated(x, positions, speed=SPEED):
    """Half against half, as Hugging Face rotates: x [..., tokens, dim]."""
    angle = positions[..., None].double() * speed.double()
    first, second = x.double().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def test_k_norm_transcription_and_rotation():
    o = observation(dead=5, gaps=3)
    expected = torch.zeros(o.keys.shape[:3], dtype=torch.float64)
    for b, g, slots, k in each_head(o):
        for j, key in zip(slots, k, strict=True):
            expected[b, g, j] = -math.sqrt(sum(float(x) ** 2 for x in key))
    close(keys.k_norm(o), expected, o.alive)
    turned = replace(o, keys=rotated(o.keys, o.positions.clamp(min=0)).float())
    close(keys.k_norm(turned), expected, o.alive)


@pytest.mark.parametrize("anchor", ["unit", "plain"])
def test_key_diff_transcription(anchor):
    o = observation(dead=5, gaps=3, seed=2)
    expected = torch.zeros(o.keys.shape[:3], dtype=torch.float64)
    for b, g, slots, k in each_head(o):
        mean = sum(x / x.norm() if anchor == "unit" else x for x in k) / len(k)
        for j, key in zip(slots, k, strict=True):
            expected[b, g, j] = -float(key @ mean) / float(key.norm() * mean.norm())
    close(keys.key_diff(o, anchor), expected, o.alive)
    assert torch.equal(keys.key_diff(o, anchor)[o.alive], keys.key_diff(other_rubbish(o), anchor)[o.alive])


def survivors_of_blocks(k, count, block, anchor):
    """Slots left by KeyDiff under a fixed cache of `count` keys, in plain loops."""
    kept = list(range(min(count, len(k))))
    for start in range(len(kept), len(k), block):
        there = kept + list(range(start, min(start + block, len(k))))
        mean = sum(k[i] / k[i].norm() if anchor == "unit" else k[i] for i in there)
        there.sort(key=lambda i: (-float(k[i] @ mean / (k[i].norm() * mean.norm())), i), reverse=True)
        kept = there[:count]
    return set(kept)


@pytest.mark.parametrize("anchor", ["unit", "plain"])
@pytest.mark.parametrize("block", [1, 3, 7, 100])
def test_key_diff_in_blocks_leaves_the_same_survivors(block, anchor):
    o = observation(dead=5, gaps=3, tokens=30, seed=4)
    counts = torch.tensor([[6, 9], [28, 30]])
    scores, exempt = keys.key_diff_blocks(o, keys.key_diff(o, anchor), counts, torch.zeros_like(o.alive), anchor, block)
    assert not exempt.any()
    assert torch.isfinite(scores).all()
    for b, g, slots, k in each_head(o):
        count = int(counts[b, g])
        best = sorted(slots, key=lambda j: float(scores[b, g, j]), reverse=True)[:count]
        assert {slots.index(j) for j in best} == survivors_of_blocks(k, count, block, anchor)


def r_kv_direct(o, mix, kernel, threshold, alone):
    """The whole n x n computation of one row and head, float64."""
    expected = torch.zeros(o.keys.shape[:3], dtype=torch.float64)
    window = [int(t) for t in o.query_positions[0] if t >= 0]
    for b, g, slots, k in each_head(o):
        n = len(slots)
        unit = [x / x.norm() for x in k]
        like = [[float(unit[i] @ unit[j]) if i != j else 0.0 for j in range(n)] for i in range(n)]
        for i in range(n):
            near = [j for j in range(n) if like[i][j] > threshold]
            if near:
                like[i][near[-1]] = 0.0
            elif alone == "first":
                like[i][0] = 0.0
        mean = torch.tensor([sum(like[i][j] for i in range(n)) / n for j in range(n)], dtype=torch.float64)
        redundancy = mean.softmax(0)
        at = [int(o.positions[b, g, j]) for j in slots]
        importance = torch.zeros(n, dtype=torch.float64)
        outside = [j for j in range(n) if at[j] not in window]
        for t in window:
            w = o.query_positions[b].tolist().index(t)
            seen = [j for j in outside if at[j] <= t]
            heads = o.queries[b, g * o.group : (g + 1) * o.group, w].double()
            largest = [max(float(query @ k[j]) for query in heads) * o.scaling for j in seen]
            importance[seen] += torch.tensor(largest, dtype=torch.float64).softmax(0) / len(window)
        for j in range(n):
            near = importance[max(0, j - kernel // 2) : j + kernel // 2 + 1]
            expected[b, g, slots[j]] = mix * near.max() - (1 - mix) * redundancy[j]
    return expected


@pytest.mark.parametrize("alone", ["nothing", "first"])
@pytest.mark.parametrize(("mix", "threshold"), [(0.1, 0.5), (0.07, 0.2), (0.9, 0.8)])
def test_r_kv_transcription(mix, threshold, alone):
    o = observation(dead=6, gaps=4, tokens=28, seed=6)
    expected = r_kv_direct(o, mix, 7, threshold, alone)
    close(keys.r_kv(o, mix, 7, threshold, alone), expected, o.alive)
    assert torch.equal(keys.r_kv(other_rubbish(o), mix)[o.alive], keys.r_kv(o, mix)[o.alive])


@pytest.fixture
def calibrated(tmp_path):
    """A file of random statistics for observations of 3 layers and 4 query heads."""
    g = torch.Generator().manual_seed(9)
    mean = torch.complex(*(torch.randn(3, 4, DIM // 2, generator=g) for _ in range(2)))
    length = mean.abs() + torch.rand(3, 4, DIM // 2, generator=g)
    calibrate.write(tmp_path / "queries.json", mean, length, learned.sampled([OUTPUT] * 3))
    return str(tmp_path / "queries.json")


def tri_direct(o, path, horizon, speed):
    """Keys with their rotation undone, then the paper's sum over frequencies and distances, float64."""
    numbers = learned.load(path)
    means = torch.complex(numbers["mean_real"], numbers["mean_imaginary"])
    expected = torch.zeros(o.keys.shape[:3], dtype=torch.float64)
    half, m = DIM // 2, len(speed)
    for b, g, slots, k in each_head(o):
        per_head = []
        for r in range(o.group):
            mean = means[o.layer, g * o.group + r].to(torch.complex128)
            length = numbers["length"][o.layer, g * o.group + r].double()
            raw = []
            for j, key in zip(slots, k, strict=True):
                at = int(o.positions[b, g, j])
                total, distances = 0.0, [2**e for e in range(17) if 2**e <= horizon]
                for f in range(half):
                    w = float(speed[f]) if f < m else 0.0
                    i, i2 = (f, f + m) if f < m else (2 * m + f - m, m + half + f - m)
                    pair = complex(float(key[i]), float(key[i2])) * complex(math.cos(w * at), -math.sin(w * at))
                    relative = complex(mean[f]) * pair.conjugate()
                    phi = math.atan2(relative.imag, relative.real)
                    for d in distances:
                        near = abs(complex(mean[f])) * abs(pair)
                        total += near * math.cos(w * (int(o.seen[b]) + d - at) + phi) / len(distances)
                    total += (float(length[f]) - abs(complex(mean[f]))) * abs(pair)
                raw.append(total)
            x = torch.tensor(raw, dtype=torch.float64)
            per_head.append((x - x.mean()) / x.std(unbiased=False))
        expected[b, g, slots] = torch.stack(per_head).amax(0)
    return expected


@pytest.mark.parametrize("horizon", [1, 100, 65536])
@pytest.mark.parametrize("rotated_pairs", [4, 2])
def test_tri_attention_transcription(calibrated, horizon, rotated_pairs):
    speed = SPEED[:rotated_pairs]  # 2: half of each head is not rotated
    o = observation(dead=5, gaps=9, layer=1, seed=10, inverse_frequencies=speed, output=OUTPUT)
    close(keys.tri_attention(o, calibrated, horizon), tri_direct(o, calibrated, horizon, speed), o.alive, 2e-4)


def test_tri_attention_refuses_another_models_file(calibrated):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # another copy of the same model
        keys.tri_attention(observation(inverse_frequencies=SPEED, output=OUTPUT.to(dtype)), calibrated)
    with pytest.raises(InputError, match="not made from this model"):
        keys.tri_attention(observation(seed=8, inverse_frequencies=SPEED), calibrated)
    with pytest.raises(InputError, match="no rotation"):
        keys.tri_attention(observation(seed=9), calibrated)


def test_shared_by_layers_is_the_mean_for_all():
    layers = [torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    scores, counts = keys.shared_by_layers(layers, [], torch.tensor([3, 5]))
    for s in scores:
        torch.testing.assert_close(s, sum(layers) / 4)
    assert all(c.tolist() == [[3] * 3, [5] * 3] for c in counts)
    with pytest.raises(InputError, match="7 to 9 tokens"):
        keys.shared_by_layers([*layers, torch.zeros(2, 3, 9)], [], torch.tensor([3, 5]))


# ---- positions alone


def splitmix(x: int) -> int:
    """SplitMix64 in Python integers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_streaming_llm_ranks_by_position():
    o = observation(dead=4, gaps=6)
    scores = keys.streaming_llm(o)
    assert scores.dtype == torch.float32
    assert torch.equal(scores.long(), o.positions)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)])
@pytest.mark.parametrize(("layer", "seed"), [(2, 7), (0, 1)])
def test_random_is_splitmix(dtype, bits, layer, seed):
    """Of seed, layer, head and position alone."""
    o = observation(dead=3, gaps=5, layer=layer, seed=seed, dtype=dtype)
    full, coarse = keys.random(o), keys.random(o, draw="keys")
    for b, head, j in o.alive.nonzero().tolist():
        x = splitmix(seed)
        for part in (layer, head, int(o.positions[b, head, j])):
            x = splitmix((x + part) % 2**64)
        assert float(full[b, head, j]) == (x >> 40) / 2**24
        assert float(coarse[b, head, j]) == (x >> (64 - bits)) / 2**bits
