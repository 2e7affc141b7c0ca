//! What is kept of a sequence: the page groups of a model, and which layer lies where in them.

use kie_kernels::abi::{DeltaHeads, Dims, Dtype, PageGroup, StateAt, StateKind};
use kie_kernels::device::Device;
use kie_kernels::lookup::DRAFT_MAX;

use crate::memory::ring_of;
use crate::model::{Delta, LayerSpec, Mixer, Spec};

/// The groups, and each layer's places in them.
pub(super) struct States {
    pub groups: Vec<PageGroup>,
    /// One a layer; of a mixer of several states in the order of [`kept`].
    pub layers: Vec<Vec<StateAt>>,
}

/// What a layer keeps of a sequence, and how far it looks back: of compressed attention the keys of
/// the window, then running softmaxes, entries, and keys of an indexer.
fn kept(layer: &LayerSpec, lanes: u32, dtype: Dtype) -> Vec<(StateKind, Option<usize>)> {
    match &layer.mixer {
        Mixer::Attention(a) => {
            let (kv_heads, head_dim) = (a.kv_heads as u32 / lanes, a.head_dim as u32);
            vec![(StateKind::KeysValues { dtype, lanes, kv_heads, head_dim }, a.window)]
        }
        Mixer::Latent(l) => vec![(StateKind::Latents { dtype, width: l.key_width() as u32 }, None)],
        // What the position before left is all that is seen.
        Mixer::Delta(d) => {
            vec![(StateKind::Recurrent { lanes, heads: delta_heads(d, lanes) }, Some(2))]
        }
        Mixer::Compressed(c) => {
            let keys = (StateKind::Latents { dtype, width: c.dim as u32 }, Some(c.window));
            let Some(entries) = c.entries else { return vec![keys] };
            let every = entries.every as u32;
            let of = |dim: usize| (StateKind::Entries { dtype, width: dim as u32, every }, None);
            let sums = (StateKind::Sums { numbers: c.sums() as u32 }, Some(2));
            let index = entries.index.map(|index| of(index.dim));
            [keys, sums, of(c.dim)].into_iter().chain(index).collect()
        }
    }
}

/// Layers that keep the same of a position and give up their pages by the same rule share a group.
/// The first group sees everything; pools are sized later.
pub(super) fn states(spec: &Spec, dtype: Dtype) -> States {
    let lanes = spec.lanes as u32;
    // Groups that see everything come first, and there is one in any case: its pages count
    // positions.
    let all: Vec<_> = spec.layers.iter().map(|layer| kept(layer, lanes, dtype)).collect();
    let whole = all.iter().flatten().filter(|(_, window)| window.is_none());
    let windowed = all.iter().flatten().filter(|(_, window)| window.is_some());
    let least = StateKind::KeysValues { dtype, lanes, kv_heads: 1, head_dim: 2 };
    let first = all.iter().flatten().next().map(|(state, _)| match state {
        StateKind::KeysValues { .. } | StateKind::Latents { .. } | StateKind::Entries { .. } => {
            (*state, false)
        }
        StateKind::Recurrent { .. } | StateKind::Sums { .. } => (least, false),
    });
    let none_whole = first.filter(|_| whole.clone().next().is_none());
    let mut keys: Vec<(StateKind, bool)> = none_whole.into_iter().collect();
    for (state, window) in whole.chain(windowed) {
        let key = (*state, window.is_some());
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let empty =
        |&(state, _): &(StateKind, bool)| PageGroup { state, layers: 0, window: None, pages: 0 };
    let mut groups: Vec<PageGroup> = keys.iter().map(empty).collect();
    let mut place = |(state, window): (StateKind, Option<usize>)| {
        let window = window.map(|window| window as u32);
        let key = (state, window.is_some());
        let at = keys.iter().position(|known| *known == key).expect("every layer's was added");
        let group = &mut groups[at];
        let place = StateAt { group: at as u32, layer: group.layers };
        group.layers += 1;
        // The widest one, which sees no further than its pages.
        group.window = group.window.max(window);
        place
    };
    let layers = all.into_iter().map(|kept| kept.into_iter().map(&mut place).collect());
    let layers = layers.collect();
    States { groups, layers }
}

/// Heads of one lane.
pub(super) fn delta_heads(delta: &Delta, lanes: u32) -> DeltaHeads {
    DeltaHeads {
        keys: delta.key_heads as u32 / lanes,
        values: delta.value_heads as u32 / lanes,
        key_dim: delta.key_dim as u32,
        value_dim: delta.value_dim as u32,
        taps: delta.taps as u32,
    }
}

/// Bytes of all groups' pages.
pub(super) fn bytes(groups: &[PageGroup], device: &dyn Device) -> u64 {
    groups.iter().map(|group| u64::from(group.pages) * device.page_bytes(group)).sum()
}

/// Bytes of one page of each group that keeps something of every position.
pub(super) fn bytes_of_one(groups: &[PageGroup], device: &dyn Device) -> u64 {
    let kept = groups.iter().filter(|group| !group.is_recurrent());
    kept.map(|group| device.page_bytes(group)).sum()
}

/// Bytes of the recurrent states that running sequences go on with: a device computes each from
/// the one before, and has one behind each row of a step, for those that are drafts.
pub(super) fn working(groups: &[PageGroup], dims: &Dims, device: &dyn Device) -> u64 {
    let kept = groups.iter().filter(|group| group.is_recurrent());
    let states = 2 * dims.slots + dims.slots.max(1 + DRAFT_MAX as u32);
    u64::from(states) * kept.map(|group| device.page_bytes(group)).sum::<u64>()
}

/// Shares the budget among the groups: room for every slot's longest sequence where there is
/// memory for it, else at least the rings of the windowed layers and the rest for the others.
/// Copies of recurrent states, which no running sequence needs, have a quarter of it at most.
pub(super) fn share(groups: &mut [PageGroup], dims: &Dims, device: &dyn Device, budget: u64) {
    let most = u64::from(dims.slots) * dims.max_pages() as u64;
    let spare = budget.saturating_sub(least(groups, dims, device)).min(budget / 4);
    let recurrent = groups.iter().filter(|group| group.is_recurrent());
    let one = recurrent.map(|group| device.page_bytes(group)).sum::<u64>().max(1);
    for group in groups.iter_mut().filter(|group| group.is_recurrent()) {
        group.pages = (u64::from(dims.slots) + spare / one).min(most) as u32;
    }
    let taken = bytes_of_copies(groups, device);
    let budget = budget.saturating_sub(taken);
    let every = (budget / bytes_of_one(groups, device).max(1)).min(most);
    let whole = groups.iter().filter(|group| group.window.is_none());
    let one = whole.map(|group| device.page_bytes(group)).sum();
    let mut pages = 0;
    // Where both cannot be had, rings and one longest sequence come first.
    for every in [every, 0] {
        if pages >= dims.max_pages() as u64 {
            break;
        }
        set_windowed(groups, dims, every);
        let left = (budget + taken).saturating_sub(bytes(groups, device));
        // Where no layer sees everything its pages are free of charge and only count positions.
        pages = left.checked_div(one).map_or(most, |pages| pages.min(most));
    }
    for group in groups.iter_mut().filter(|group| group.window.is_none()) {
        group.pages = pages as u32;
    }
}

/// Gives windowed groups a ring a slot, or `every` pages where that is more; others none. A ring
/// may be longer than a sequence; `Pages` counts on it for every slot all the same.
fn set_windowed(groups: &mut [PageGroup], dims: &Dims, every: u64) {
    for group in groups.iter_mut().filter(|group| !group.is_recurrent()) {
        let ring = ring_of(group, dims.chunk()) as u64;
        group.pages = match group.window {
            Some(_) => every.max(u64::from(dims.slots) * ring) as u32,
            None => 0,
        };
    }
}

/// Bytes of the copies of recurrent states.
fn bytes_of_copies(groups: &[PageGroup], device: &dyn Device) -> u64 {
    let kept = groups.iter().filter(|group| group.is_recurrent());
    kept.map(|group| u64::from(group.pages) * device.page_bytes(group)).sum()
}

/// Bytes of the least pages that [`share`] needs: one longest sequence, and every slot's rings.
pub(super) fn least(groups: &[PageGroup], dims: &Dims, device: &dyn Device) -> u64 {
    let mut groups = groups.to_vec();
    set_windowed(&mut groups, dims, 0);
    for group in groups.iter_mut().filter(|group| group.is_recurrent()) {
        group.pages = dims.slots;
    }
    for group in groups.iter_mut().filter(|group| group.window.is_none()) {
        group.pages = dims.max_pages() as u32;
    }
    bytes(&groups, device)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use kie_kernels::device::Options;
    use kie_kernels::devices;

    /// Copies of recurrent states take a quarter of the budget, nothing from a longest sequence,
    /// and no more than there can be pages.
    #[test]
    fn copies_of_recurrent_states_have_what_is_left() {
        let device = devices::open("cpu", &Options::default()).unwrap();
        let dims = Dims {
            hidden: 64,
            lanes: 1,
            vocab: 512,
            eps: 1e-6,
            max_positions: 6400,
            slots: 4,
            columns: 516,
        };
        let state =
            StateKind::KeysValues { dtype: Dtype::F16, lanes: 1, kv_heads: 2, head_dim: 256 };
        let heads = DeltaHeads { keys: 16, values: 32, key_dim: 128, value_dim: 128, taps: 4 };
        let recurrent = StateKind::Recurrent { lanes: 1, heads };
        let all = [
            PageGroup { state, layers: 12, window: None, pages: 0 },
            PageGroup { state: recurrent, layers: 36, window: Some(2), pages: 0 },
        ];
        let [page, copy] = [&all[0], &all[1]].map(|group| group.page_bytes());
        assert_eq!((page, copy), (12 * 64 * 2 * 512 * 2, 36 * 16 * (512 * 3 + 2 * 128 * 128) * 4));
        let least = least(&all, &dims, &*device);
        assert_eq!(least, 100 * page + 4 * copy);
        let shared = |budget: u64| {
            let mut groups = all;
            share(&mut groups, &dims, &*device, budget);
            assert!(bytes(&groups, &*device) <= budget);
            groups.map(|group| group.pages)
        };
        assert_eq!(shared(least), [100, 4]);
        assert_eq!(shared(least + copy), [100, 5], "what a sequence leaves");
        let budget = 4 * least;
        let copies = 4 + (budget / 4 / copy) as u32;
        assert_eq!(shared(budget)[1], copies, "a quarter, beside one a slot");
        assert!(shared(budget)[0] > 100);
        assert_eq!(shared(1 << 40), [400, 400], "a page of each for every slot's longest sequence");
        assert!(shared(least - 1)[0] < 100, "too little is seen by the caller");
    }

    /// Compressed attention keeps its window apart from what grows, and several recurrent states
    /// share what one has.
    #[test]
    fn windows_entries_and_sums_are_groups_of_their_own() {
        let device = devices::open("cpu", &Options::default()).unwrap();
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/own_deepseek_v4");
        let spec = Spec::read(std::path::Path::new(path)).unwrap();
        let States { groups, layers } = states(&spec, Dtype::F32);
        let kinds: Vec<_> = groups.iter().map(|g| (g.state, g.layers, g.window)).collect();
        let entries = |every| StateKind::Entries { dtype: Dtype::F32, width: 8, every };
        let keys = StateKind::Latents { dtype: Dtype::F32, width: 8 };
        // Entries and keys of the indexer are of one size; two halves of both are kept, three
        // numbers a channel.
        let wanted = [
            (entries(4), 2, None),
            (entries(128), 1, None),
            (keys, 3, Some(8)),
            (StateKind::Sums { numbers: 96 }, 1, Some(2)),
            (StateKind::Sums { numbers: 24 }, 1, Some(2)),
        ];
        assert_eq!(kinds, wanted);
        assert_eq!(layers.iter().map(Vec::len).collect::<Vec<_>>(), [1, 4, 3]);
        let bytes_of: Vec<_> = groups.iter().map(PageGroup::page_bytes).collect();
        assert_eq!(bytes_of, [2 * 16 * 8 * 4, 8 * 4, 3 * 64 * 8 * 4, 96 * 4, 24 * 4]);
        let dims = Dims {
            hidden: 24,
            lanes: 1,
            vocab: 512,
            eps: 1e-6,
            max_positions: 40_000,
            slots: 2,
            columns: 66,
        };
        let shared = |budget: u64| {
            let mut groups = groups.clone();
            share(&mut groups, &dims, &*device, budget);
            assert!(bytes(&groups, &*device) <= budget);
            groups.iter().map(|group| group.pages).collect::<Vec<_>>()
        };
        let least = least(&groups, &dims, &*device);
        assert_eq!(shared(least), [625, 625, 6, 2, 2], "a window is a ring, however long the text");
        let more = shared(least + 4 * (96 + 24) * 4);
        assert_eq!(more[3..], [6, 6], "what is left is shared out");
        assert_eq!(shared(1 << 40), [1250; 5]);
    }
}
