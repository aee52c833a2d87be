"""The method once more, slowly: Python integers, loops and the words of the algorithm. Shares no code with ``sdo``."""

from __future__ import annotations

import math
from fractions import Fraction

MASK = 2**64 - 1


def philox4x64(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for round_number in range(10):
        if round_number:
            k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
        p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(p1 >> 64) ^ c[1] ^ k[0], p1 & MASK, (p0 >> 64) ^ c[3] ^ k[1], p0 & MASK]
    return c


def raw(seed: int, purpose: int, epoch: int, count: int) -> list[int]:
    """numpy raises the counter before each block of four."""
    out: list[int] = []
    block = 0
    while len(out) < count:
        block += 1
        out += philox4x64([block, 0, purpose, epoch], [seed, 0])
    return out[:count]


def whole_rows(unit) -> list[list[int]]:
    """Rows on the 2**-24 grid as integers."""
    rows = [[Fraction(float(x)) * 2**24 for x in row] for row in unit]
    assert all(x.denominator == 1 for row in rows for x in row)
    return [[int(x) for x in row] for row in rows]


def dot(a: list[int], b: list[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def neighbors(rows: list[list[int]], valid: list[bool], pool: list[int], k: int) -> dict[int, list[int]]:
    graph = {}
    for i in pool:
        others = [j for j in pool if j != i and valid[j]] if valid[i] else []
        graph[i] = sorted(others, key=lambda j: (-dot(rows[i], rows[j]), j))[:k]
    return graph


def walk(order: list[int], graph: dict[int, list[int]], size: int, cover: bool):
    visited: set[int] = set()
    buffer: list[int] = []
    batches: list[list[int]] = []
    last = None
    for a in order:
        if a in visited:
            continue
        visited.add(a)
        last = a
        if cover:
            visited |= set(graph[a])
        for i in [a, *graph[a]]:
            if i in buffer:
                continue
            buffer.append(i)
            if len(buffer) == size:
                batches.append(buffer)
                buffer = []
    return batches, buffer, last


def sdo_epochs(
    unit,
    valid,
    size,
    epochs,
    *,
    k=4,
    delta_tau=2,
    retain="0.2",
    visit="cover",
    graph="dynamic",
    locality="knn",
    exposure=True,
    seed=0,
):
    """Yield (batches, pool, u, cold, hot) of each organizer epoch."""
    rows, valid = whole_rows(unit), [bool(v) for v in valid]
    n = len(rows)
    pool = list(range(n))
    u = [0] * n
    everyone = neighbors(rows, valid, pool, k)
    for e in range(epochs):
        keys = raw(seed, 1, e, n)
        order = sorted(pool, key=lambda i: (keys[i], i))
        if locality == "shuffle":
            edges = {i: [] for i in pool}
        elif locality == "random":
            kk = min(k, len(pool) - 1)
            draws = raw(seed, 2, e, n * kk)
            edges = {}
            for i in pool:
                left = [j for j in pool if j != i]
                edges[i] = [left.pop(draws[i * kk + t] % len(left)) for t in range(kk)]
        elif graph == "static":
            edges = {i: [j for j in everyone[i] if j in pool] for i in pool}
        else:
            edges = neighbors(rows, valid, pool, k)
        batches, buffer, last = walk(order, edges, size, visit == "cover")
        for batch in batches:
            for i in batch:
                u[i] += 1
        if buffer:
            seen = list(u)
            for i in buffer:
                seen[i] += 1

            def tie(j, order=order, last=last):
                if locality != "knn":
                    return order.index(j)
                return -dot(rows[last], rows[j]) if valid[last] and valid[j] else math.inf

            while len(buffer) < size:
                best = min((j for j in pool if j not in buffer), key=lambda j: (seen[j], tie(j), j))
                buffer.append(best)
            batches.append(buffer)
            for i in buffer:
                u[i] += 1
        cold = [i for i in range(n) if u[i] < (e + 1) * delta_tau]
        hot = [i for i in range(n) if i not in cold]
        yield batches, pool, list(u), cold, hot
        if exposure:
            draws = raw(seed, 3, e, n)
            arrival = {i: -math.log(((draws[i] >> 12) + 0.5) / 2**52) * u[i] for i in hot}
            kept = sorted(hot, key=lambda i: (arrival[i], i))[: math.ceil(Fraction(retain) * len(hot))]
            pool = sorted(cold + kept)
            while len(pool) < size:
                pool = sorted([*pool, min((i for i in range(n) if i not in pool), key=lambda i: (u[i], i))])
