//! Bytes of pages, and places of words that other lanes want.

use super::*;
use crate::mono::shapes::model;

#[test]
fn pages_are_halves_in_whole_tiles() {
    let group = |head_dim| PageGroup {
        state: StateKind::KeysValues {
            dtype: crate::abi::Dtype::F32,
            lanes: 1,
            kv_heads: 2,
            head_dim,
        },
        layers: 3,
        window: None,
        pages: 1,
    };
    // Keys and values of 64 positions of one head in three layers, as halves.
    let one = 3 * 2 * 64 * 128 * 2;
    assert_eq!(page_bytes(&group(128), (1, 1), 1), 2 * one);
    assert_eq!(page_bytes(&group(128), (8, 1), 1), 8 * one);
    assert_eq!(page_bytes(&group(128), (8, 1), 2), 16 * one, "two halves a number");
    // Heads are padded to whole tiles.
    assert_eq!(page_bytes(&group(40), (8, 1), 1), 8 * one / 2);
}

#[test]
fn words_for_other_lanes_have_as_many_places_as_delays_ask_for() {
    let with = |delay: &dyn Fn(u32) -> i32| {
        let model = model("2b");
        let layer = |n| Layer { delay: [delay(n); 2], ..model.layer[0] };
        Model { layer: (0..model.layers()).map(layer).collect(), ..model.clone() }
            .num_buffers_other()
    };
    assert_eq!(model("8b").num_buffers_other(), 1, "there is no other lane");
    assert_eq!(with(&|_| 0), 1);
    assert_eq!(with(&|_| 1), 3);
    assert_eq!(with(&|_| 2), 5);
    assert_eq!(with(&|n| if n < 3 { -1 } else { 3 }), 7);
    assert_eq!(with(&|n| if n == 14 { 2 } else { -1 }), 3, "12's words are read in layer 14");
    assert_eq!(with(&|n| if n == 14 { 14 } else { -1 }), 15, "and here layer 0's");
}
