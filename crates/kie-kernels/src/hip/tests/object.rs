//! Code objects: what was put in is read back, broken ones are refused, a real one is understood.

use std::process::Command;

use crate::hip::code_object::{kernels, Kernel};

/// What a note is made of.
pub enum Note<'a> {
    Number(u64),
    Text(&'a str),
    List(Vec<Note<'a>>),
    Map(Vec<(&'a str, Note<'a>)>),
}

impl Note<'_> {
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Number(n @ 0..=0x7f) => out.push(*n as u8),
            Self::Number(n @ 0x80..=0xffff) => {
                out.push(0xcd);
                out.extend((*n as u16).to_be_bytes());
            }
            Self::Number(n) => {
                out.push(0xcf);
                out.extend(n.to_be_bytes());
            }
            Self::Text(text) => {
                let length = text.len() as u8;
                out.extend(if length < 32 { vec![0xa0 | length] } else { vec![0xd9, length] });
                out.extend(text.as_bytes());
            }
            Self::List(values) => {
                out.push(0xdc);
                out.extend((values.len() as u16).to_be_bytes());
                values.iter().for_each(|value| value.write(out));
            }
            Self::Map(fields) => {
                out.push(0x80 | fields.len() as u8);
                for (key, value) in fields {
                    Note::Text(key).write(out);
                    value.write(out);
                }
            }
        }
    }
}

/// A code object with nothing but a note.
pub fn object(note: &Note<'_>) -> Vec<u8> {
    let mut map = Vec::new();
    note.write(&mut map);
    let mut notes = Vec::new();
    for (name, kind, bytes) in [(&b"GNU\0"[..], 3_u32, &b"12345"[..]), (b"AMDGPU\0", 32, &map)] {
        notes.extend((name.len() as u32).to_le_bytes());
        notes.extend((bytes.len() as u32).to_le_bytes());
        notes.extend(kind.to_le_bytes());
        for part in [name, bytes] {
            notes.extend(part);
            notes.resize(notes.len().next_multiple_of(4), 0);
        }
    }
    let mut out = vec![0; 64 + 2 * 56];
    out[..6].copy_from_slice(b"\x7fELF\x02\x01");
    out[32..40].copy_from_slice(&64_u64.to_le_bytes());
    out[54..56].copy_from_slice(&56_u16.to_le_bytes());
    out[56..58].copy_from_slice(&2_u16.to_le_bytes());
    let second = 64 + 56;
    out[64] = 1;
    out[second] = 4;
    out[second + 8..second + 16].copy_from_slice(&176_u64.to_le_bytes());
    out[second + 32..second + 40].copy_from_slice(&(notes.len() as u64).to_le_bytes());
    out.extend(notes);
    out
}

fn argument(kind: &str, bytes: u64) -> Note<'_> {
    Note::Map(vec![(".size", Note::Number(bytes)), (".value_kind", Note::Text(kind))])
}

/// The object of one kernel `k` with parameters of these sizes.
pub fn object_of_k(args_bytes: &[u64]) -> Vec<u8> {
    spilled_object_of_k(args_bytes, 3)
}

/// The same where so many vector registers did not fit.
pub fn spilled_object_of_k(args_bytes: &[u64], spilled: u64) -> Vec<u8> {
    let mut args: Vec<_> = args_bytes.iter().map(|&n| argument("by_value", n)).collect();
    args.push(argument("hidden_block_count_x", 4));
    let kernel = Note::Map(vec![
        (".args", Note::List(args)),
        (".name", Note::Text("k")),
        (".vgpr_count", Note::Number(130)),
        (".sgpr_count", Note::Number(100)),
        (".vgpr_spill_count", Note::Number(spilled)),
        (".private_segment_fixed_size", Note::Number(70_000)),
        (".group_segment_fixed_size", Note::Number(16)),
        (".max_flat_workgroup_size", Note::Number(416)),
        (".wavefront_size", Note::Number(64)),
        (".a_field_with_a_name_of_more_than_31_bytes", Note::Number(1)),
    ]);
    object(&Note::Map(vec![("amdhsa.kernels", Note::List(vec![kernel]))]))
}

#[test]
fn what_was_put_in_is_read_back() {
    let wanted = Kernel {
        name: "k".into(),
        registers: 130,
        scalar_registers: 100,
        spilled_registers: 3,
        private_bytes: 70_000,
        shared_bytes: 16,
        threads_max: 416,
        wave_lanes: 64,
        args_bytes: vec![24],
    };
    assert_eq!(kernels(&object_of_k(&[24])).unwrap(), [wanted]);
}

#[test]
fn broken_objects_are_refused_or_read_but_never_harm() {
    let whole = object_of_k(&[24]);
    for bytes in 0..whole.len() - 3 {
        assert!(kernels(&whole[..bytes]).is_err(), "cut after {bytes} bytes");
    }
    for at in 0..whole.len() {
        for bit in 0..8 {
            let mut flipped = whole.clone();
            flipped[at] ^= 1 << bit;
            // Some flips change a number; none may do worse.
            let _ = kernels(&flipped);
        }
    }
    let deep = (0..100).fold(Note::Number(1), |inner, _| Note::List(vec![inner]));
    assert!(kernels(&object(&deep)).unwrap_err().contains("deep"));
    assert!(kernels(b"__CLANG_OFFLOAD_BUNDLE__").unwrap_err().contains("bundle"));
    let nothing = object(&Note::Map(vec![("amdhsa.version", Note::Number(1))]));
    assert!(kernels(&nothing).unwrap_err().contains("no kernels"));
}

#[test]
fn a_real_object_is_understood() {
    let folder = super::Folder::new("object");
    let (source, object) = (folder.0.join("k.hip"), folder.0.join("k.co"));
    let text = "struct Args { unsigned *to; int n[5]; };\n\
                extern \"C\" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, \
                96))) void kernel_of_one_argument(Args a) { a.to[0] = a.n[3]; }\n";
    std::fs::write(&source, text).unwrap();
    let flags = "-x hip --offload-arch=gfx942 --offload-device-only --no-gpu-bundle-output \
                 -nogpuinc -nogpulib -O1";
    let clang = Command::new("clang++-19")
        .args(flags.split_whitespace())
        .args([&source, std::path::Path::new("-o"), &object])
        .status();
    let Ok(clang) = clang else {
        return super::skipped("a real code object", "clang++-19 is missing");
    };
    assert!(clang.success());
    let found = kernels(&std::fs::read(&object).unwrap()).unwrap();
    let [kernel] = &found[..] else { panic!("{found:?}") };
    assert_eq!(kernel.name, "kernel_of_one_argument");
    assert_eq!((kernel.args_bytes.as_slice(), kernel.threads_max), (&[32][..], 96));
    assert_eq!((kernel.private_bytes, kernel.spilled_registers, kernel.wave_lanes), (0, 0, 64));
    assert!(kernel.registers > 0 && kernel.scalar_registers > 0, "{kernel:?}");
}
