// Drafts of tokens by prompt lookup, made and checked on the device. What followed where the text
// last read as it ends now is likely to follow again; lookup.rs has the rule, word for word. Drafts
// are columns of the next step behind the sequences' own, positions of the same sequence. Those
// that the sampler chooses as well are kept, with the token behind them; keys and values behind
// that are written again by the step that comes to their positions. Each column draws with its own
// position's number, so the tokens are those of steps of one.
//   text of a sequence = its prompt and what it made, `kTextPad` numbers that are no id before it
//   its prediction = what the caller expects, the prompt's last `kTextPad` ids before it
// Block 0 of a rank adds what a step made; the next step's candidates make it visible, and until
// then each block has it in `recent`. Every block searches for itself, so nothing is exchanged.
// Under a grammar the host drafts: what it gives with a launch is checked in the first step, each
// column under a mask of its own (ops/mask.h), and the steps behind have nothing more.
// Traffic: 4 bytes an id of the text, and of the prediction unless it goes on as expected.
#pragma once

#include "args.h"
#include "block.h"
#include "control.h"
#include "lowered.h"
#include "ops/drafts.h"
#include "ops/mtp.h"
#include "ops/sample.h"
#include "platform.h"
#include "shape.h"

static_assert(!kLookup || (kMatchMost == 16 && kTextPad == kMatchMost + 4), "windows of quads");
static_assert(!kLookup || kRecent >= kMatchMost + kDraftMost + 1 + 8, "what the end is made of");
// Behind the last whole quad of ids that all blocks see, at most.
constexpr int kEndPlaces = kDraftMost + 1 + 3;
constexpr u32 kOrderMask = (1u << 27) - 1;  // of a match, below its length
constexpr u32 kNoPlace = ~0u;

// Text (0) or prediction (1) of a row, from its first id on.
KIE_DEVICE u32* ids_of(const DecodeArgs& args, u32 row, int which) {
    return args.texts + ((u64)row * 2 + which) * kTextRow + kTextPad;
}
KIE_DEVICE u32 id_at(const u32* ids, int n) {
    const Quad q = load_state(ids + (n & ~3));
    const u32 low = n & 1 ? q.v[1] : q.v[0], high = n & 1 ? q.v[3] : q.v[2];
    return n & 2 ? high : low;
}
KIE_DEVICE u32& recent_id(const Block& b, int s, int n) {
    return drafts_of(b).recent[s][n & (kRecent - 1)];
}
// Ids of a sequence's text, and how many of them are in quads that all blocks see.
KIE_DEVICE int text_ids(const DecodeArgs& args, const Block& b, int s) {
    return (int)(args.column[s].position + drafts_of(b).sequence[s].made) + 1;
}
KIE_DEVICE int seen_ids(int ids) { return max_i(0, ids - (kDraftMost + 1)) / 4 * 4; }

// The last ids of a text, the last first.
struct Ending {
    u32 v[kMatchMost];
};
// The longer match is better, then the place that comes first in the order of the search.
KIE_DEVICE u32 match_of(u32 length, u32 order) { return length << 27 | (kOrderMask - order); }
// The best of `best` and of the places behind ids `at .. at + 3`, whose orders `order_of` knows.
template <class F>
KIE_DEVICE u32 match_quad(const u32* ids, int at, const Ending& end, u32 best, F order_of) {
    constexpr int kBefore = kMatchMost / 4;
    const Quad own = load_state(ids + at);
    bool any = false;
    KIE_UNROLL for (int i = 0; i < 4; ++i) any |= own.v[i] == end.v[0];
    if (!any) return best;
    u32 window[kMatchMost + 4];
    KIE_UNROLL for (int n = 0; n <= kBefore; ++n) {
        const Quad q = n == kBefore ? own : load_state(ids + at + 4 * (n - kBefore));
        KIE_UNROLL for (int i = 0; i < 4; ++i) window[4 * n + i] = q.v[i];
    }
    KIE_UNROLL for (int i = 0; i < 4; ++i) {
        u32 length = 0;
        bool same = true;
        KIE_UNROLL for (int n = 0; n < kMatchMost; ++n) same &=
            window[kMatchMost + i - n] == end.v[n],
            length += same;
        const u32 order = order_of(at + i + 1);
        const u32 match = order == kNoPlace ? 0 : match_of(length, order);
        best = match > best ? match : best;
    }
    return best;
}
// The best match of a sequence's text, which has `n` ids; all consumers, with one result. `turn`
// counts the searches of a step for which they met.
KIE_DEVICE u32 best_match(const DecodeArgs& args, const Block& b, int s, int n, int& turn) {
    const Sequence& q = args.column[s];
    const int me = thread(), expected = (int)args.drafting[s].prediction,
              cursor = min_i((int)drafts_of(b).sequence[s].cursor, expected);
    Ending end;
    KIE_UNROLL for (int i = 0; i < kMatchMost; ++i) end.v[i] =
        i < n ? recent_id(b, s, n - 1 - i) : kNoPlace - 1;
    u32 best = 0;
    const u32* ids = ids_of(args, q.row, 1);
    const auto in_prediction = [&](int at) {
        if (at < 0 || at >= expected) return kNoPlace;
        return (u32)(at >= cursor ? at - cursor : expected - 1 - at);
    };
    // In a copy that goes on nothing comes before what is expected next.
    if (cursor < expected) best = match_quad(ids, (cursor + 3) / 4 * 4 - 4, end, 0, in_prediction);
    if (best == match_of(kMatchMost, 0)) return best;
    for (int at = 4 * me - 4; at < expected; at += 4 * kThreads)
        best = match_quad(ids, at, end, best, in_prediction);
    const auto in_text = [&](int at) { return (u32)(expected + n - 1 - at); };
    const int seen = seen_ids(n);
    if (me < kEndPlaces && n - 1 - me > seen) {
        const int at = n - 1 - me;
        u32 length = 0;
        bool same = true;
        for (int i = 0; i < kMatchMost; ++i)
            same &= at - 1 - i >= 0 && recent_id(b, s, at - 1 - i) == end.v[i], length += same;
        const u32 match = match_of(length, in_text(at));
        best = match > best ? match : best;
    }
    ids = ids_of(args, q.row, 0);
    // From the end: what comes later here is worse than a match that cannot be longer.
    for (int at = seen - 4 - 4 * me; at >= 0 && best >> 27 < (u32)kMatchMost; at -= 4 * kThreads)
        best = match_quad(ids, at, end, best, in_text);
    KIE_UNROLL for (int m = kTeam / 2; m > 0; m /= 2) {
        const u32 other = shuffle_xor(best, m);
        best = other > best ? other : best;
    }
    // Of two rows in turn: whoever still reads the other one has not passed the barrier.
    u32* all = drafts_of(b).best[turn++ & 1];
    if (lane() == 0) all[me / kTeam] = best;
    sync_consumers<kThreads>();
    KIE_UNROLL for (int i = 0; i < kWarps; ++i) best = all[i] > best ? all[i] : best;
    return best;
}

// Draft `n` behind the match: `kNoPlace` behind the last one.
struct Behind {
    int at;
    bool predicted;
};
KIE_DEVICE Behind behind_match(u32 match, int ids, int expected, int cursor) {
    const int order = (int)(kOrderMask - (match & kOrderMask));
    if (order >= expected) return {ids - 1 - (order - expected), false};
    return {order < expected - cursor ? cursor + order : expected - 1 - order, true};
}
// Draft `n` of a sequence that has so many ids. What ends with the text goes on as it began: it is
// a repetition.
KIE_DEVICE u32 id_behind(const DecodeArgs& args, const Block& b, int s, const Behind& behind,
                         int ids, int n) {
    n = behind.predicted ? behind.at + n : behind.at + n % (ids - behind.at);
    if (!behind.predicted && n >= seen_ids(ids)) return recent_id(b, s, n);
    return id_at(ids_of(args, args.column[s].row, behind.predicted), n);
}
// The next step's columns: each sequence's own, then drafts behind it while there is room. All
// consumers, of sequences whose last token is known; they meet at the end.
KIE_DEVICE void draft(const DecodeArgs& args, Block& b) {
    Drafts& all = drafts_of(b);
    const int me = thread(), sequences = kMtp ? predicting(args, b) : (int)args.live;
    if (me < sequences) {
        Drafter& d = all.sequence[me];
        all.columns.sequence[me] = me, all.columns.ahead[me] = d.made;
        const u32 given = d.made == 0 ? args.drafting[me].given : 0,
                  reach = d.rest > 0 ? 0 : d.reach + given;
        if (d.rest > 0) --d.rest;
        // The last of a step's tokens is chosen behind its last draft.
        const u32 left = args.column[me].last - args.column[me].position - d.made - 1;
        d.most = reach < left ? reach : left;
    }
    sync_consumers<kThreads>();
    int next = sequences, turn = 0;
    KIE_NO_UNROLL for (int s = 0; s < sequences; ++s) {
        Drafter& d = all.sequence[s];
        const int ids = text_ids(args, b, s), most = min_i((int)d.most, kColumns - next),
                  expected = (int)args.drafting[s].prediction,
                  cursor = min_i((int)d.cursor, expected);
        const bool given = args.drafting[s].given > 0;
        const u32 match = most > 0 && !given ? best_match(args, b, s, ids, turn) : 0;
        const bool found = match >> 27 >= (u32)kMatchLeast,
                   unmatched = !given && !found && d.along != 0 && cursor < expected;
        const Behind behind =
            unmatched ? Behind{cursor, true} : behind_match(match, ids, expected, cursor);
        int count = given || found || unmatched ? most : 0;
        if (count > 0 && behind.predicted) count = min_i(count, expected - behind.at);
        if (me < count) {
            tokens_of(b)[next + me] =
                given ? args.drafting[s].ids[me] : id_behind(args, b, s, behind, ids, me);
            all.columns.sequence[next + me] = s, all.columns.ahead[next + me] = d.made + 1 + me;
        }
        if (me == 0) {
            d.count = count, d.first = next;
            d.began = behind.predicted ? 1 + behind.at : 0, d.unmatched = unmatched;
        }
        next += count;
    }
    if (me == 0) all.columns.live = next, all.quiet = next > sequences ? 0 : all.quiet + 1;
    b.live = next;
    sync_consumers<kThreads>();
}

// A step checked a sequence's drafts, of which the first `accepted` were right.
KIE_DEVICE void learn(Drafter& d, u32 accepted) {
    // The step's last token stands where the first wrong one did.
    if (d.began > 0) d.cursor = d.began + accepted;
    d.along = d.began > 0 && (accepted > 0 || d.unmatched == 0);
    if (accepted == 0) {
        d.misses = min_i((int)d.misses + 1, kMissesMost);
        d.rest = (1u << (d.misses - 1)) - 1;
        if (d.misses > 1) d.reach = 1;
        return;
    }
    d.misses = 0;
    d.reach = accepted == d.count ? kDraftMost : min_i(kDraftMost, 2 * (int)accepted + 1);
}
// What the step made of a sequence; one thread.
KIE_DEVICE void accept(const DecodeArgs& args, const Block& b, int s) {
    if constexpr (kMtp) return accept_predicted(args, b, s);
    Drafter& d = drafts_of(b).sequence[s];
    const Sequence& q = args.column[s];
    u32* text = ids_of(args, q.row, 0);
    u32 accepted = 0;
    d.kept = s;
    for (int column = s;; column = (int)d.first + (int)accepted++) {
        const Picked& picked = picked_of(b)[column];
        // A position whose mask was late is computed again.
        if (picked.id != kLate) d.kept = column;
        tell(args, b, q, d.made, picked.id, picked.logprob);
        const u32 at = q.position + ++d.made;
        recent_id(b, s, (int)at) = picked.id;
        if (block() == 0 && d.reach > 0) text[at] = picked.id;
        tokens_of(b)[s] = picked.id < (u32)kVocabAll ? picked.id : 0;
        ends_of(b)[s] = picked.end;
        if (picked.end != 0 || accepted == d.count) break;
        if (picked.id != tokens_of(b)[d.first + accepted]) break;
    }
    d.drafted += d.count, d.accepted += accepted;
    if (d.count > 0 && args.drafting[s].given == 0) learn(d, accepted);
}
// All sequences', a warp each.
KIE_DEVICE void accept_drafts(const DecodeArgs& args, const Block& b) {
    const int s = thread() / kTeam;
    if (s < (int)args.live && lane() == 0) accept(args, b, s);
    sync_consumers<kThreads>();
}

// Before the first step.
KIE_DEVICE void begin_drafts(const DecodeArgs& args, Block& b) {
    const int me = thread();
    Drafts& all = drafts_of(b);
    if (me < (int)args.live) {
        const Drafting& from = args.drafting[me];
        all.sequence[me] = {0,           0, 0,          0, from.reach, from.misses, from.rest,
                            from.cursor, 0, from.along, 0, 0,          0,           (u32)me};
    }
    if (me == 0) all.quiet = 0;
    for (int i = me; i < (int)args.live * kRecent; i += kThreads) {
        const int s = i / kRecent, n = (int)args.column[s].position - i % kRecent;
        if (n >= 0 && args.drafting[s].reach > 0)
            recent_id(b, s, n) = id_at(ids_of(args, args.column[s].row, 0), n);
    }
    sync_consumers<kThreads>();
    draft(args, b);
}
// Behind the last step, for the host: control.h.
KIE_DEVICE void report_drafts(const DecodeArgs& args, const Block& b) {
    const int me = thread();
    if (block_all(args) != 0 || me >= (int)args.live) return;
    const Drafts& all = drafts_of(b);
    const Drafter& d = all.sequence[me];
    const u32 words[8] = {d.reach,   d.misses,   d.rest,    d.cursor,
                          d.drafted, d.accepted, all.quiet, d.along};
    KIE_UNROLL for (int i = 0; i < 8; ++i)
        store_host(args.control + kControlDrafts + 8 * me + i, words[i]);
}
