//! Tensor parallelism of attention: which query and kv heads each of so many ranks has. Heads go by
//! whole kv heads, fewer on the last rank, or several ranks have the same kv head, each with a part
//! of its query heads.

use std::ops::Range;

use crate::abi::{DeltaHeads, PageGroup, StateKind};
use crate::error::Error;

/// Query and kv heads of each of so many ranks: whole kv heads with all their query heads, fewer
/// on the last rank, or a part of the query heads of one kv head, which several ranks then have.
/// None where a rank would have nothing.
pub(crate) fn dealt(heads: u32, kv_heads: u32, ranks: u32) -> Option<(u32, u32)> {
    let group = heads / kv_heads;
    if kv_heads >= ranks {
        let each = kv_heads.div_ceil(ranks);
        return ((ranks - 1) * each < kv_heads).then_some((each * group, each));
    }
    let sharers = ranks / kv_heads;
    let each = group.div_ceil(sharers);
    (ranks.is_multiple_of(kv_heads) && (sharers - 1) * each < group).then_some((each, 1))
}

/// Which of the query and kv heads a rank has, of as many places as [`dealt`] says; the last places
/// may stay empty. Heads must have been dealt.
pub(crate) fn heads_of(rank: u32, ranks: u32, heads: u32, kv_heads: u32) -> [Range<u32>; 2] {
    let group = heads / kv_heads;
    if kv_heads >= ranks {
        let each = kv_heads.div_ceil(ranks);
        let kv = |rank: u32| (rank * each).min(kv_heads);
        let (from, to) = (kv(rank), kv(rank + 1));
        return [from * group..to * group, from..to];
    }
    // Several ranks share a kv head, each with a part of its query heads.
    let sharers = ranks / kv_heads;
    let each = group.div_ceil(sharers);
    let (kv, part) = (rank / sharers, rank % sharers);
    let query = |part: u32| kv * group + (part * each).min(group);
    [query(part)..query(part + 1), kv..kv + 1]
}

/// The state of a page group on all of so many ranks, those of a model of one lane as a lane each:
/// kv heads that several ranks have are counted for each.
pub(crate) fn state_of(group: &PageGroup, ranks: u32) -> StateKind {
    match group.state {
        StateKind::KeysValues { dtype, lanes: 1, kv_heads, head_dim } if ranks > 1 => {
            let kv_heads = kv_heads.div_ceil(ranks);
            StateKind::KeysValues { dtype, lanes: ranks, kv_heads, head_dim }
        }
        StateKind::Recurrent { lanes: 1, heads } if ranks > 1 => {
            let (keys, values) = (heads.keys.div_ceil(ranks), heads.values.div_ceil(ranks));
            StateKind::Recurrent { lanes: ranks, heads: DeltaHeads { keys, values, ..heads } }
        }
        state @ (StateKind::KeysValues { .. }
        | StateKind::Recurrent { .. }
        | StateKind::Latents { .. }
        | StateKind::Entries { .. }
        | StateKind::Sums { .. }) => state,
    }
}

/// What cannot be shared out.
pub(crate) fn indivisible(lanes: u32, heads: u32, kv_heads: u32, ranks: u32) -> Error {
    let detail = format!(
        "{lanes} lanes, {heads} query and {kv_heads} kv heads do not divide by {ranks} ranks: \
         each takes as many lanes, or whole kv heads' heads, or an equal part of one's"
    );
    Error::Indivisible { ranks, detail }
}

/// Norms of q and k over all heads: each rank would need the other ranks' sums.
pub(crate) fn normed_over_all_heads(ranks: u32) -> Error {
    let detail =
        format!("q and k are normed over all heads at once, which do not divide by {ranks} ranks");
    Error::Indivisible { ranks, detail }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Dtype;

    #[test]
    fn shared_kv_heads_are_counted_on_every_rank() {
        // Keys and values of 64 positions of one head in three layers, as halves.
        let one = 3 * 2 * 64 * 128 * 2;
        for (kv_heads, lanes, ranks, held) in [
            (2, 1, 1, 2),
            (2, 1, 2, 2),
            (2, 1, 4, 4),
            (2, 1, 8, 8),
            (8, 1, 8, 8),
            // Three, three, and room for three on the last.
            (8, 1, 3, 9),
            // Lanes are never shared.
            (2, 8, 8, 16),
        ] {
            let dtype = Dtype::F16;
            let state = StateKind::KeysValues { dtype, lanes, kv_heads, head_dim: 128 };
            let group = PageGroup { state, layers: 3, window: None, pages: 1 };
            let all = PageGroup { state: state_of(&group, ranks), ..group };
            assert_eq!(all.page_bytes(), held * one, "{kv_heads} in {lanes} lanes on {ranks}");
        }
    }

    #[test]
    fn heads_are_dealt_out_whole_in_parts_or_not_at_all() {
        for (heads, kv_heads, ranks, wanted) in [
            (32, 8, 8, Some((4, 1))),
            (32, 8, 2, Some((16, 4))),
            (16, 8, 3, Some((6, 3))),
            (16, 2, 8, Some((2, 1))),
            (6, 2, 4, Some((2, 1))),
            (28, 4, 8, Some((4, 1))),
            (4, 1, 3, None),
            (4, 2, 8, None),
            (6, 3, 4, None),
            (12, 6, 4, None),
        ] {
            assert_eq!(dealt(heads, kv_heads, ranks), wanted, "{heads}/{kv_heads} on {ranks}");
            let Some((each, kv_each)) = wanted else { continue };
            let mut seen = Vec::new();
            for rank in 0..ranks {
                let [query, kv] = heads_of(rank, ranks, heads, kv_heads);
                assert!(!query.is_empty() && query.len() <= each as usize, "{query:?}");
                assert!(!kv.is_empty() && kv.len() <= kv_each as usize, "{kv:?}");
                // A query head's kv head has the place that the kernel looks for it in.
                for (place, head) in query.clone().enumerate() {
                    let at = kv.start + place as u32 / (each / kv_each);
                    assert_eq!(at, head / (heads / kv_heads), "head {head} of rank {rank}");
                }
                seen.extend(query);
            }
            assert!(seen.into_iter().eq(0..heads), "{heads}/{kv_heads} on {ranks}");
        }
    }
}
