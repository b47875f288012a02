"""V4.1's forward pass spelled out row by row in plain loops: a second reading of the formulas, for one whole sequence.

Shares weights, configuration and quantizers with the model, and no block. Slow; for short sequences.
"""

import math

import torch

from engine.models.deepseek_v41.engram_hash import hash_multipliers, hash_primes
from engine.models.deepseek_v41.quantize import Q4, Q8, Q4Kv, fake


class Spelled:
    def __init__(self, config, weights, compressed_ids, *, quantized):
        self.c, self.w, self.map = config, weights, compressed_ids
        self.q8 = (lambda x: fake(Q8(32), x)) if quantized else (lambda x: x)
        self.q4 = (lambda x: fake(Q4(32), x)) if quantized else (lambda x: x)
        self.q4kv = (lambda x: fake(Q4Kv(16), x)) if quantized else (lambda x: x)

    def rms(self, x, weight):
        return weight * x / torch.sqrt((x * x).mean() + self.c.norm_eps)

    def frequencies(self, long):
        count, c = self.c.rope_dim // 2, self.c
        base = c.compress_rope_theta if long else c.rope_theta
        plain = [base ** (-2 * i / c.rope_dim) for i in range(count)]
        if not long:
            return plain
        yarn = c.rope_scaling

        def dimension(rotations):
            turns = yarn.original_max_positions / (rotations * 2 * math.pi)
            return c.rope_dim * math.log(turns) / (2 * math.log(base))

        low = max(math.floor(dimension(yarn.beta_fast)), 0)
        high = min(math.ceil(dimension(yarn.beta_slow)), c.rope_dim - 1)
        ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(count)]
        return [f / yarn.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]

    def rope(self, x, position, *, long, sign=1):
        """Turn the last dimensions of one vector."""
        out = x.clone()
        first = len(x) - self.c.rope_dim
        for i, frequency in enumerate(self.frequencies(long)):
            a, b, angle = x[first + 2 * i], x[first + 2 * i + 1], sign * position * frequency
            out[first + 2 * i] = a * math.cos(angle) - b * math.sin(angle)
            out[first + 2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
        return out

    def mix(self, streams, weights):
        """Return pre, post, comb of one row."""
        hc, eps = self.c.mhc.mult, self.c.mhc.eps
        flat = streams.flatten()
        z = weights.fn @ flat / torch.sqrt((flat * flat).mean() + self.c.norm_eps)
        pre = torch.sigmoid(z[:hc] * weights.scale[0] + weights.base[:hc]) + eps
        post = 2 * torch.sigmoid(z[hc : 2 * hc] * weights.scale[1] + weights.base[hc : 2 * hc])
        comb = (z[2 * hc :] * weights.scale[2] + weights.base[2 * hc :]).view(hc, hc).softmax(1) + eps
        for step in range(self.c.mhc.sinkhorn_iters):
            if step:
                comb = comb / (comb.sum(1)[:, None] + eps)
            comb = comb / (comb.sum(0)[None, :] + eps)
        return pre, post, comb

    def spread(self, y, streams, post, comb):
        hc = len(streams)
        return torch.stack([post[k] * y + sum(comb[j, k] * streams[j] for j in range(hc)) for k in range(hc)])

    def experts(self, x, moe, count, is_image=False):
        scores = torch.log1p(torch.exp(moe.gate @ x)).sqrt()
        steered = (scores + (moe.bias_vl if is_image else moe.bias)).tolist()
        chosen = sorted(range(len(steered)), key=lambda e: (-steered[e], e))[:count]
        total = sum(scores[e] for e in chosen) if count > 1 else 1.0
        limit, entering = self.c.moe.swiglu_limit, self.q8(x)

        def inner(w13):
            gate, up = (w13 @ entering).chunk(2)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return gate * torch.sigmoid(gate) * up

        y = moe.shared.w2 @ self.q8(inner(moe.shared.w13))
        for e in chosen:
            y = y + moe.w2[e] @ self.q8(inner(moe.w13[e]) * (scores[e] / total * self.c.moe.route_scale))
        return y

    def attention_parts(self, x, weights, position, *, long):
        latent = self.rms(weights.wq_a @ self.q8(x), weights.q_norm)
        q = (weights.wq_b @ self.q8(latent)).view(self.c.num_heads, -1)
        q = torch.stack([self.rope(head, position, long=long) for head in q])
        return latent, q, self.window_row(x, weights, position, long=long)

    def window_row(self, x, weights, position, *, long):
        return self.q8(self.rope(self.rms(weights.wkv @ self.q8(x), weights.kv_norm), position, long=long))

    def attend(self, q, keys, weights, position, *, long):
        out = []
        for head, sink in zip(q, weights.sink, strict=True):
            p = torch.exp(torch.stack([head @ key for key in keys]) / math.sqrt(self.c.head_dim))
            o = sum(pk * key for pk, key in zip(p, keys, strict=True)) / (p.sum() + torch.exp(sink))
            out.append(self.rope(o, position, long=long, sign=-1))
        grouped = self.q8(torch.cat(out)).view(self.c.o_groups, -1)
        u = torch.cat([a @ o for a, o in zip(weights.wo_a, grouped, strict=True)])
        return weights.wo_b @ self.q8(u)

    def ngram_row(self, ids, images, position, number):
        """Return what the n-gram table of engram layer `number` gives a token."""
        config = self.c.engram
        layer = config.layers[number]
        pad, history = int(self.map[config.pad_token_id]), []
        for s in range(config.max_ngram):
            p = position - s
            dead = p < 0 or images[p] or (history and history[-1] is None)
            history.append(None if dead else int(self.map[ids[p]]))
        history = [pad if t is None else t for t in history]
        m, primes = hash_multipliers(layer, config), hash_primes(config)[number]
        mixed, rows = history[0] * m[0], []
        for i in range(1, config.max_ngram):
            mixed ^= history[i] * m[i]
            for h in range(config.num_heads):
                column = (i - 1) * config.num_heads + h
                rows.append(mixed % primes[column] + sum(primes[:column]))
        weights = self.w.layers[layer].engram
        return Q8(32).decode(weights.codes[rows], weights.scales[rows]).double().flatten()

    def engram(self, streams, found, weights):
        hc, d, eps = self.c.mhc.mult, self.c.hidden_size, self.c.norm_eps
        projected = weights.wkv @ self.q8(found)
        value, out = projected[hc * d :], []
        for i in range(hc):
            x, k = streams[i], projected[i * d : (i + 1) * d]
            a = (x * weights.q_weight[i] * weights.k_weight[i] * k).sum() / math.sqrt(d)
            a = a / torch.sqrt((x * x).mean() + eps) / torch.sqrt((k * k).mean() + eps)
            out.append(x + torch.sigmoid(torch.copysign(a.abs().clamp(min=1e-6).sqrt(), a)) * value)
        return torch.stack(out)

    def write_entries(self, inputs, attn, m):
        """Return the entries and index keys of all whole groups."""
        weights, main, keys = attn.compressor, [], []
        for j in range(len(inputs) // m):
            rows = inputs[j * m : (j + 1) * m]
            if m == 1:
                pooled = weights.wkv @ rows[0]
            else:
                gates = torch.stack([weights.wgate @ x for x in rows])
                values = torch.stack([weights.wkv @ x for x in rows])
                pooled = (gates.exp() * values).sum(0) / gates.exp().sum(0)
            latent = self.rms(pooled, weights.norm)
            key = self.rms(attn.index_key.wk @ latent, attn.index_key.norm)
            keys.append(self.q4(self.rope(key, j * m, long=True)))
            main.append(self.q4kv(self.rope(latent, j * m, long=True)))
        return main, keys

    def select(self, plan, x, latent, attn, position, keys, candidates):
        """Return the chosen entries of one row, and the candidate blocks if the layer gives some."""
        index, rules, visible = self.c.index, self.c.candidates, (position + 1) // plan.m
        heads = (attn.indexer.wq_b @ self.q8(latent)).view(index.num_heads, -1)
        heads = [self.q4(self.rope(head, position, long=True)) for head in heads]
        weights = (attn.indexer.weights_proj @ x) / math.sqrt(index.head_dim * index.num_heads)
        scores = [
            float(sum(w * max(float(head @ keys[j]), 0.0) for w, head in zip(weights, heads, strict=True)))
            for j in range(visible)
        ]
        blocks = candidates
        if plan.is_candidate_source:
            size = rules.block_size
            best = {b: max(scores[b * size : (b + 1) * size]) for b in range(-(-visible // size))}
            if best:
                best[(visible - 1) // size] = math.inf
            blocks = set(sorted(best, key=lambda b: (-best[b], b))[: rules.top_blocks])
        allowed = [j for j in range(visible) if not plan.uses_candidates or j // rules.block_size in candidates]
        return sorted(sorted(allowed, key=lambda j: (-scores[j], j))[: index.top_k]), blocks

    def forward(self, ids, images=None, image_rows=None):
        """Return logits [t, vocab], captures [t, targets * d]."""
        c, count = self.c, len(ids)
        images = images or [False] * count
        x0 = [image_rows[t] if images[t] else self.w.embed[ids[t]] for t in range(count)]
        streams = [row.repeat(c.mhc.mult, 1) for row in x0]
        pre = [torch.eye(c.mhc.mult, dtype=row.dtype)[0] for row in x0]
        captures, main, keys = [], {}, {}
        chosen, candidates = {}, [None] * count
        for plan, layer in zip(c.layers, self.w.layers, strict=True):
            long = plan.m > 0
            if plan.has_engram:
                number = c.engram.layers.index(plan.index)
                for t in range(count):
                    if not images[t]:
                        found = self.ngram_row(ids, images, t, number)
                        streams[t] = self.engram(streams[t], found, layer.engram)
            if plan.is_captured:
                captures.append(torch.stack([s.mean(0) for s in streams]))
            mixes = [self.mix(s, layer.hc_attn) for s in streams]
            inputs = [self.rms(pre[t] @ streams[t], layer.attn_norm) for t in range(count)]
            parts = [self.attention_parts(inputs[t], layer.attn, t, long=long) for t in range(count)]
            if plan.owns_kv:
                main[plan.index], keys[plan.index] = self.write_entries(inputs, layer.attn, plan.m)
            for t in range(count):
                latent, q, _ = parts[t]
                seen = [parts[p][2] for p in range(max(0, t - c.window + 1), t + 1)]
                if long:
                    if plan.owns_index_query:
                        chosen[plan.index, t], candidates[t] = self.select(
                            plan, inputs[t], latent, layer.attn, t, keys[plan.kv_source], candidates[t]
                        )
                    seen += [main[plan.kv_source][j] for j in chosen[plan.index_source, t]]
                y = self.attend(q, seen, layer.attn, t, long=long)
                a_pre, post, comb = mixes[t]
                s = self.spread(y, streams[t], post, comb)
                f_pre, post, comb = self.mix(s, layer.hc_ffn)
                y = self.experts(self.rms(a_pre @ s, layer.ffn_norm), layer.moe, c.moe.top_k, images[t])
                streams[t], pre[t] = self.spread(y, s, post, comb), f_pre
        logits = torch.stack([self.w.head @ self.rms(pre[t] @ streams[t], self.w.norm) for t in range(count)])
        return logits, torch.cat(captures, 1)

    def draft(self, captures, anchor):
        """Return greedy drafts and confidences behind `anchor`, which follows the captured rows."""
        c, d, length = self.c, self.w.dspark, len(captures)
        size, first = c.dspark.block_size, max(0, length - c.window)
        ids = [anchor] + [c.dspark.noise_token_id] * (size - 1)
        streams = [self.w.embed[i].repeat(c.mhc.mult, 1) for i in ids]
        pre = [torch.eye(c.mhc.mult, dtype=s.dtype)[0] for s in streams]
        context = {p: self.rms(d.main_proj @ self.q8(captures[p]), d.main_norm) for p in range(first, length)}
        for stage in d.stages:
            old = [self.window_row(u, stage.attn, p, long=False) for p, u in context.items()]
            mixes = [self.mix(s, stage.hc_attn) for s in streams]
            inputs = [self.rms(p @ s, stage.attn_norm) for p, s in zip(pre, streams, strict=True)]
            parts = [self.attention_parts(x, stage.attn, length + i, long=False) for i, x in enumerate(inputs)]
            for i in range(size):
                keys = old + [part[2] for part in parts]
                y = self.attend(parts[i][1], keys, stage.attn, length + i, long=False)
                a_pre, post, comb = mixes[i]
                s = self.spread(y, streams[i], post, comb)
                f_pre, post, comb = self.mix(s, stage.hc_ffn)
                y = self.experts(self.rms(a_pre @ s, stage.ffn_norm), stage.moe, c.dspark.top_k)
                streams[i], pre[i] = self.spread(y, s, post, comb), f_pre
        tokens, confidences, before = [], [], anchor
        for i in range(size):
            x = pre[i] @ streams[i]
            logits = self.w.head @ self.rms(x, d.norm) + d.markov_head @ d.markov_embed[before]
            confidences.append(float(torch.sigmoid(d.confidence @ torch.cat((x, d.markov_embed[before])))))
            before = int(logits.argmax())
            tokens.append(before)
        return tokens, confidences
