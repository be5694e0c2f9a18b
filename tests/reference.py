"""A slow and obvious H2O: loops over heads, queries and slots, with the definitions written out."""

import math

import torch


def turn(vector: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """RoPE of one vector, half-split pairs, one pair at a time."""
    d = len(vector)
    out = vector.clone()
    for i in range(d // 2):
        angle = position * theta ** (-2 * i / d)
        a, b = vector[i], vector[i + d // 2]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + d // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def slot_position(policy, order: int, index: int, seen: int, base: int) -> int:
    """Where a slot sits for the chunk that starts at token `seen`; `order` is its place in the cache."""
    if policy.positions == "rolled" or seen <= policy.cache:  # nothing has been evicted yet
        return order
    if index < policy.sinks:
        return max(index, base - policy.recent - policy.sinks + index)
    return max(0, base - (seen - index))


def rank(policy, slot: dict, seen: int, farthest: int) -> float:
    """What a slot is kept for: `h2o` sums attention, `streamh2o` averages it over the queries that could give it.

    At true distances a slot more than `farthest` tokens away has no position, and goes first.
    """
    if policy.positions == "distance" and seen - slot["index"] > farthest:
        return -math.inf
    if policy.name != "streamh2o":
        return slot["score"]
    if policy.reach and seen - slot["index"] > policy.reach:
        return -math.inf
    queries = max(16, seen - slot["index"] - policy.far)
    return slot["score"] / sum(policy.decay ** (age / 256) for age in range(queries))


def reference_losses(model, ids, policy, chunk) -> torch.Tensor:
    """Losses of ids [count] for a Llama model, by the definitions of the design: score, evict, position."""
    config = model.config
    theta, trained = config.rope_parameters["rope_theta"], config.max_position_embeddings
    head_dim = config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads
    caches = [[[] for _ in range(config.num_key_value_heads)] for _ in range(config.num_hidden_layers)]
    logits = []
    for seen in range(0, len(ids), chunk):
        part = ids[seen : seen + chunk]
        states = model.model.embed_tokens(part)
        for layer, slots_of in zip(model.model.layers, caches, strict=True):
            normed = layer.input_layernorm(states)
            attention = layer.self_attn
            q = attention.q_proj(normed).view(len(part), -1, head_dim)
            k = attention.k_proj(normed).view(len(part), -1, head_dim)
            v = attention.v_proj(normed).view(len(part), -1, head_dim)
            mixed = torch.zeros(len(part), config.num_attention_heads, head_dim, dtype=states.dtype)
            for kv_head, slots in enumerate(slots_of):
                held = len(slots)
                base = held if policy.positions == "rolled" or seen <= policy.cache else min(seen, trained - len(part))
                for slot in slots:
                    slot["score"] *= policy.decay ** (len(part) / 256)
                for i in range(len(part)):
                    slots.append({"key": k[i, kv_head], "value": v[i, kv_head], "score": 0.0, "index": seen + i})
                turned = [
                    turn(s["key"], slot_position(policy, order, s["index"], seen, base), theta)
                    for order, s in enumerate(slots)
                ]
                for i in range(len(part)):
                    visible = range(held + i + 1)
                    for head in range(kv_head * group, (kv_head + 1) * group):
                        query = turn(q[i, head], base + i, theta)
                        raw = torch.stack([query @ turned[s] for s in visible]) / math.sqrt(head_dim)
                        weights = torch.softmax(raw, 0)
                        mixed[i, head] = sum(weights[s] * slots[s]["value"] for s in visible)
                        faded = policy.decay ** ((len(part) - 1 - i) / 256)
                        for s in visible:
                            if seen + i - slots[s]["index"] >= policy.far:
                                slots[s]["score"] += float(weights[s]) * faded
                if len(slots) > policy.cache:
                    end = seen + len(part)
                    first, last = policy.sinks, len(slots) - policy.recent
                    ranks = [rank(policy, slot, end, trained - chunk) for slot in slots]
                    middle = sorted(range(first, last), key=ranks.__getitem__, reverse=True)
                    kept = set(range(first)) | set(middle[: policy.hitters]) | set(range(last, len(slots)))
                    slots[:] = [slots[s] for s in sorted(kept)]
            states = states + attention.o_proj(mixed.flatten(1))
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        logits.append(model.lm_head(model.model.norm(states)))
    logits = torch.cat(logits)
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
