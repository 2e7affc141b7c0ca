//! What is kept of a sequence: the page groups of a model, and which layer lies where in them.

use kie_kernels::abi::{Dims, Dtype, PageGroup, StateAt, StateKind};
use kie_kernels::device::Device;

use crate::memory::ring_pages;
use crate::model::{Mixer, Spec};

/// The groups, and each layer's place in them.
pub(super) struct States {
    pub groups: Vec<PageGroup>,
    pub layers: Vec<StateAt>,
}

/// Layers that keep the same of a position and give up their pages by the same rule share a group.
/// The first group sees everything; pools are sized later.
pub(super) fn states(spec: &Spec, dtype: Dtype) -> States {
    let lanes = spec.lanes as u32;
    let state_of = |mixer: &Mixer| {
        let Mixer::Attention(a) = mixer;
        let (kv_heads, head_dim) = (a.kv_heads as u32 / lanes, a.head_dim as u32);
        StateKind::KeysValues { dtype, lanes, kv_heads, head_dim }
    };
    // Groups that see everything come first, and there is one in any case: its pages count
    // positions.
    let whole = spec.layers.iter().filter(|layer| layer.window().is_none());
    let windowed = spec.layers.iter().filter(|layer| layer.window().is_some());
    let first = spec.layers.first().map(|layer| (state_of(&layer.mixer), false));
    let none_whole = first.filter(|_| whole.clone().next().is_none());
    let mut keys: Vec<(StateKind, bool)> = none_whole.into_iter().collect();
    for layer in whole.chain(windowed) {
        let key = (state_of(&layer.mixer), layer.window().is_some());
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let empty =
        |&(state, _): &(StateKind, bool)| PageGroup { state, layers: 0, window: None, pages: 0 };
    let mut groups: Vec<PageGroup> = keys.iter().map(empty).collect();
    let mut layers = Vec::with_capacity(spec.layers.len());
    for layer in &spec.layers {
        let window = layer.window().map(|window| window as u32);
        let key = (state_of(&layer.mixer), window.is_some());
        let at = keys.iter().position(|known| *known == key).expect("every layer's was added");
        let group = &mut groups[at];
        layers.push(StateAt { group: at as u32, layer: group.layers });
        group.layers += 1;
        // The widest one, which sees no further than its pages.
        group.window = group.window.max(window);
    }
    States { groups, layers }
}

/// Bytes of all groups' pages.
pub(super) fn bytes(groups: &[PageGroup], device: &dyn Device) -> u64 {
    groups.iter().map(|group| u64::from(group.pages) * device.page_bytes(group)).sum()
}

/// Bytes of one page of each group.
pub(super) fn bytes_of_one(groups: &[PageGroup], device: &dyn Device) -> u64 {
    groups.iter().map(|group| device.page_bytes(group)).sum()
}

/// Shares the budget among the groups: room for every slot's longest sequence where there is
/// memory for it, else at least the rings of the windowed layers and the rest for the others.
pub(super) fn share(groups: &mut [PageGroup], dims: &Dims, device: &dyn Device, budget: u64) {
    let most = u64::from(dims.slots) * dims.max_pages() as u64;
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
        let left = budget.saturating_sub(bytes(groups, device));
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
    for group in groups {
        group.pages = group.window.map_or(0, |window| {
            let ring = ring_pages(window as usize, dims.chunk()) as u64;
            every.max(u64::from(dims.slots) * ring) as u32
        });
    }
}

/// Bytes of the least pages that [`share`] needs: one longest sequence, and every slot's rings.
pub(super) fn least(groups: &[PageGroup], dims: &Dims, device: &dyn Device) -> u64 {
    let mut groups = groups.to_vec();
    set_windowed(&mut groups, dims, 0);
    for group in groups.iter_mut().filter(|group| group.window.is_none()) {
        group.pages = dims.max_pages() as u32;
    }
    bytes(&groups, device)
}
