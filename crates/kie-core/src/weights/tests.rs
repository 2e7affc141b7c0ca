//! Checkpoints that are broken in one way each, and what the error says.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use serde_json::{json, Value};

use super::finite::{first_not_finite, Numbers};
use super::*;
use kie_kernels::abi::{Codes, Dtype};

/// A folder of the repository.
fn repository(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder)
}

/// A model folder in a temporary place, from one fixture, to be broken.
struct Folder(PathBuf);

impl Folder {
    fn new(fixture: &str, test: &str) -> Self {
        let data = repository("tests/data").join(fixture);
        let path = std::env::temp_dir().join(format!("kie-{test}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        for name in ["config.json", "model.safetensors"] {
            std::fs::copy(data.join(name), path.join(name)).unwrap();
        }
        Self(path)
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.0.join(SINGLE)).unwrap()
    }

    fn write(&self, bytes: &[u8]) {
        std::fs::write(self.0.join(SINGLE), bytes).unwrap();
    }

    /// Rewrites the header; the data stays.
    fn header(&self, change: impl FnOnce(&mut serde_json::Map<String, Value>)) {
        let bytes = self.bytes();
        let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: Value = serde_json::from_slice(&bytes[8..end]).unwrap();
        change(header.as_object_mut().unwrap());
        let text = header.to_string();
        let length = (text.len() as u64).to_le_bytes();
        self.write(&[&length, text.as_bytes(), &bytes[end..]].concat());
    }

    fn open(&self) -> Result<Checkpoint> {
        Checkpoint::open(&self.0, &Spec::read(&self.0)?)
    }

    fn refusal(&self) -> String {
        match self.open() {
            Ok(_) => panic!("opened"),
            Err(error) => {
                assert_eq!(error.class(), "LoadError", "{error}");
                error.to_string()
            }
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_file_that_was_cut_is_read_as_zeros_and_told_of() {
    let folder = Folder::new("qwen2", "cut-while-mapped");
    let checkpoint = folder.open().unwrap();
    assert!(checkpoint.unchanged().is_ok());
    let file = std::fs::OpenOptions::new().write(true).open(folder.0.join(SINGLE)).unwrap();
    file.set_len(64).unwrap();
    let last = |t: &Tensor| t.bytes().last().copied();
    let all = checkpoint.tensors.values().flatten().map(last);
    assert!(all.filter(|byte| *byte != Some(0)).count() <= 1, "what shares the first page");
    let error = checkpoint.unchanged().unwrap_err();
    assert_eq!(error.class(), "LoadError");
    assert!(error.to_string().contains("then 64"), "{error}");
}

const NAME: &str = "model.layers.1.mlp.up_proj.weight";

#[test]
fn whole_file_opens() {
    let folder = Folder::new("qwen2", "whole");
    let checkpoint = folder.open().unwrap();
    let tensor = checkpoint.tensor(Role::Up(1)).unwrap();
    assert_eq!((tensor.name.as_str(), tensor.encoding.codes), (NAME, Codes::Bf16));
    assert_eq!(tensor.bytes().len(), tensor.shape.iter().product::<usize>() * 2);
    checkpoint.check_finite(tensor).unwrap();
}

#[test]
fn cut_and_empty_files() {
    let folder = Folder::new("qwen2", "cut");
    let bytes = folder.bytes();
    for len in [0, 7, 8, 100, bytes.len() / 2, bytes.len() - 1] {
        folder.write(&bytes[..len]);
        assert!(folder.refusal().contains("model.safetensors"));
    }
    std::fs::remove_file(folder.0.join(SINGLE)).unwrap();
    assert!(folder.refusal().contains("neither"));
}

#[test]
fn hostile_header_lengths() {
    let folder = Folder::new("qwen2", "length");
    let mut bytes = folder.bytes();
    for length in [u64::MAX, 1 << 40, bytes.len() as u64, 0] {
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        folder.write(&bytes);
        folder.refusal();
    }
}

#[test]
fn missing_surplus_and_misshapen_tensors() {
    let folder = Folder::new("qwen2", "missing");
    let whole = folder.bytes();
    folder.header(|h| {
        let entry = h.remove(NAME).unwrap();
        h.insert("model.layers.1.mlp.other.weight".to_owned(), entry);
    });
    assert!(folder.refusal().contains(NAME));
    folder.write(&whole);
    folder.header(|h| {
        let shape = h[NAME]["shape"].as_array().unwrap().clone();
        h[NAME]["shape"] = json!([shape[1], shape[0]]);
    });
    let text = folder.refusal();
    assert!(text.contains(NAME) && text.contains("shape [176, 64]"), "{text}");
    folder.write(&whole);
    folder.header(|h| h[NAME]["dtype"] = json!("I16"));
    assert!(folder.refusal().contains("I16"));
}

#[test]
fn surplus_tensor_is_named() {
    let folder = Folder::new("qwen2", "surplus");
    let end = {
        let bytes = folder.bytes();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap());
        bytes.len() as u64 - header
    };
    folder.header(|h| {
        let entry = json!({"dtype": "U8", "shape": [4], "data_offsets": [end, end + 4]});
        h.insert("model.extra".to_owned(), entry);
    });
    folder.write(&[folder.bytes(), vec![0; 4]].concat());
    assert!(folder.refusal().contains("model.extra"));
}

#[test]
fn duplicate_names_and_overlaps() {
    let folder = Folder::new("qwen2", "duplicate");
    let whole = folder.bytes();
    let end = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let text = String::from_utf8(whole[8..end].to_vec()).unwrap();
    let entry = r#"{"model.norm.weight":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},"#;
    let twice = text.replacen('{', entry, 1);
    let length = (twice.len() as u64).to_le_bytes();
    folder.write(&[&length, twice.as_bytes(), &whole[end..]].concat());
    assert!(folder.refusal().contains("twice"));
    folder.write(&whole);
    folder.header(|h| h[NAME]["data_offsets"] = json!([0, 22528]));
    let text = folder.refusal();
    assert!(text.contains("where the last tensor ends"), "{text}");
}

#[test]
fn offsets_that_do_not_fit() {
    let folder = Folder::new("qwen2", "offsets");
    let whole = folder.bytes();
    for (key, value, wanted) in [
        ("data_offsets", json!([0, u64::MAX]), "inside the"),
        ("data_offsets", json!([9, 8]), "inside the"),
        ("data_offsets", json!([0, -1]), "two data_offsets"),
        ("data_offsets", json!([0]), "two data_offsets"),
        ("shape", json!([u64::MAX, u64::MAX]), "BF16 ["),
        ("shape", json!([176, 65]), "BF16 [176, 65], got 22528 bytes"),
        ("shape", json!("64"), "a shape"),
        ("dtype", json!(5), "a dtype"),
        ("dtype", json!("F32"), "F32 [176, 64], got 22528 bytes"),
    ] {
        folder.header(|h| h[NAME][key] = value);
        let text = folder.refusal();
        assert!(text.contains(NAME) && text.contains(wanted), "{text}");
        folder.write(&whole);
    }
}

#[test]
fn what_is_no_file_is_not_waited_for() {
    for name in ["config.json", SINGLE, "generation_config.json", INDEX] {
        let folder = Folder::new("qwen2", "device");
        let _ = std::fs::remove_file(folder.0.join(name));
        std::os::unix::fs::symlink("/dev/zero", folder.0.join(name)).unwrap();
        assert!(folder.refusal().contains("not a regular file"));
    }
}

#[test]
fn fp8_needs_its_scales() {
    let folder = Folder::new("own_llama_fp8_tied", "scales");
    let name = "model.layers.0.mlp.up_proj.weight_scale_inv";
    let whole = folder.bytes();
    let checkpoint = folder.open().unwrap();
    let tensor = checkpoint.tensor(Role::Up(0)).unwrap();
    let [rows, cols] = tensor.shape[..] else { panic!("a matrix") };
    let blocks = rows.div_ceil(128) * cols.div_ceil(128);
    assert!(blocks > 1 && tensor.encoding.codes == Codes::E4m3);
    assert_eq!(tensor.scales.as_ref().unwrap().bytes().len(), 4 * blocks);
    folder.header(|h| {
        let entry = h.remove(name).unwrap();
        h.insert("other".to_owned(), entry);
    });
    assert!(folder.refusal().contains(name));
    folder.write(&whole);
    folder.header(|h| h[name]["shape"] = json!([blocks, 1, 1]));
    let text = folder.refusal();
    assert!(text.contains(name) && text.contains("wanted F32 or BF16"), "{text}");
    folder.write(&whole);
    let config = std::fs::read_to_string(folder.0.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["quantization_config"] = Value::Null;
    std::fs::write(folder.0.join("config.json"), config.to_string()).unwrap();
    assert!(folder.refusal().contains("F8_E4M3"));
}

#[test]
fn tensors_that_take_no_part_may_be_there() {
    let folder = Folder::new("qwen3", "ignored");
    let bytes = folder.bytes();
    let end = bytes.len() - 8 - u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    folder.header(|h| {
        let entry = |at: usize| json!({"dtype": "F32", "shape": [1], "data_offsets": [at, at + 4]});
        h.insert("lm_head.weight".to_owned(), entry(end));
        h.insert("model.layers.0.self_attn.rotary_emb.inv_freq".to_owned(), entry(end + 4));
    });
    folder.write(&[folder.bytes(), vec![0; 8]].concat());
    let checkpoint = folder.open().unwrap();
    assert!(checkpoint.tensor(Role::Head).is_none(), "a tied head is the embedding");
}

#[test]
fn sharded_checkpoints_must_agree_with_their_index() {
    let demo = repository("python/kie/demo");
    let folder = Folder::new("qwen2", "shards");
    std::fs::remove_file(folder.0.join(SINGLE)).unwrap();
    for entry in demo.read_dir().unwrap().map(|e| e.unwrap()) {
        std::fs::copy(entry.path(), folder.0.join(entry.file_name())).unwrap();
    }
    assert_eq!(folder.open().unwrap().files().len(), 2);
    let index = json::read(&demo.join(INDEX)).unwrap();
    let norm = "model.norm.weight";
    let refusal = |change: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let mut index = index.clone();
        change(index["weight_map"].as_object_mut().unwrap());
        std::fs::write(folder.0.join(INDEX), index.to_string()).unwrap();
        folder.refusal()
    };
    let text = refusal(&|map| map[norm] = json!("model-00001-of-00002.safetensors"));
    assert!(text.contains(norm) && text.contains("as indexed"), "{text}");
    let text = refusal(&|map| drop(map.remove(norm)));
    assert!(text.contains(norm) && text.contains("weight_map"), "{text}");
    let text = index.to_string().replacen(norm, "model.layers.0.attention_norm.weight", 1);
    std::fs::write(folder.0.join(INDEX), text).unwrap();
    assert!(folder.refusal().contains("twice"));
    let text = refusal(&|map| {
        std::fs::copy(demo.join("model-00001-of-00002.safetensors"), folder.0.join("b")).unwrap();
        map["lm_head.weight"] = json!("b");
    });
    assert!(text.contains("also stands in"), "{text}");
}

/// Every fixture of the repository and, where `KIE_FIXTURES` names a folder of more, of that.
#[test]
fn every_fixture_opens_and_is_finite() {
    let mut roots = vec![repository("tests/data")];
    roots.extend(std::env::var_os("KIE_FIXTURES").map(PathBuf::from));
    let folders = roots.iter().flat_map(|root| root.read_dir().unwrap()).map(|e| e.unwrap().path());
    let mut opened = 0;
    for folder in folders.chain([repository("python/kie/demo")]) {
        let Ok(config) = json::read(&folder.join("config.json")) else { continue };
        let known = crate::model::architectures().any(|name| config["model_type"] == name);
        match Spec::read(&folder) {
            Err(error) => assert_eq!((error.class(), known), ("UnsupportedModelError", false)),
            Ok(spec) => {
                let checkpoint = Checkpoint::open(&folder, &spec).unwrap();
                for tensor in &spec.tensors {
                    let tensor = checkpoint.tensor(tensor.role).unwrap();
                    checkpoint.check_finite(tensor).unwrap();
                }
                opened += 1;
            }
        }
    }
    assert!(opened >= 15, "{opened}");
}

#[test]
fn not_a_number_is_found_where_it_is() {
    let folder = Folder::new("qwen2", "nan");
    let offset = folder.open().unwrap().tensor(Role::Up(1)).unwrap().offset;
    let mut bytes = folder.bytes();
    bytes[offset + 2 * 5000..][..2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    folder.write(&bytes);
    let checkpoint = folder.open().unwrap();
    let error = checkpoint.check_finite(checkpoint.tensor(Role::Up(1)).unwrap()).unwrap_err();
    assert!(error.to_string().contains("number 5000"), "{error}");
    for (dtype, bad) in [
        (Dtype::F32, f32::INFINITY.to_le_bytes().to_vec()),
        (Dtype::F16, 0xfc00u16.to_le_bytes().to_vec()),
        (Dtype::F8E4m3, vec![0xff]),
    ] {
        let mut bytes = vec![0; 10_000 * dtype.bytes()];
        assert_eq!(first_not_finite(Numbers::Plain(dtype), &bytes), None);
        bytes[9_999 * dtype.bytes()..].copy_from_slice(&bad);
        assert_eq!(first_not_finite(Numbers::Plain(dtype), &bytes), Some(9_999));
    }
}

#[test]
fn index_that_points_nowhere_or_outside() {
    let folder = Folder::new("qwen2", "index");
    let index = |file: &str| {
        let map = json!({"weight_map": {"model.norm.weight": file}});
        std::fs::write(folder.0.join(INDEX), map.to_string()).unwrap();
        folder.refusal()
    };
    assert!(index("absent.safetensors").contains("no such file"));
    for outside in ["../model.safetensors", "/etc/passwd", "", "a/b.safetensors"] {
        assert!(index(outside).contains("a file name in the folder"));
    }
    let map = json!({"weight_map": {"model.nothing": SINGLE}});
    std::fs::write(folder.0.join(INDEX), map.to_string()).unwrap();
    assert!(folder.refusal().contains("model.nothing"));
    let all: serde_json::Map<String, Value> = Spec::read(&folder.0)
        .unwrap()
        .tensors
        .iter()
        .map(|t| (t.name.clone(), json!(SINGLE)))
        .collect();
    let map = json!({"weight_map": all});
    std::fs::write(folder.0.join(INDEX), map.to_string()).unwrap();
    folder.open().unwrap();
}

#[test]
fn experts_are_slices_of_their_files() {
    let folder = Folder::new("qwen3_moe", "experts");
    let checkpoint = folder.open().unwrap();
    let ups = checkpoint.all(Role::ExpertUp(1));
    assert_eq!(ups.len(), 8);
    assert_eq!(ups[5].name, "model.layers.1.mlp.experts.5.up_proj.weight");
    assert_eq!((&ups[5].shape[..], ups[5].row_step), (&[48, 64][..], 1));
    // Gates and ups by turns: of codes, of scales and of biases.
    let folder = Folder::new("gpt_oss_mxfp4", "stacked");
    let checkpoint = folder.open().unwrap();
    let [gates, ups] = [Role::ExpertGate(2), Role::ExpertUp(2)].map(|role| checkpoint.all(role));
    let scale = |t: &Tensor| t.scales.as_ref().map(|scales| scales.offset).unwrap();
    assert_eq!((gates.len(), ups.len(), gates[7].row_step), (8, 8, 2));
    assert_eq!([ups[0].offset - gates[0].offset, scale(&ups[0]) - scale(&gates[0])], [48, 3]);
    let apart = [gates[7].offset - gates[6].offset, scale(&gates[7]) - scale(&gates[6])];
    assert_eq!(apart, [128 * 48, 128 * 3]);
    let biases = [Role::ExpertGateBias(2), Role::ExpertUpBias(2)];
    let [gate, up] = biases.map(|role| checkpoint.tensor(role).unwrap());
    assert_eq!((up.offset - gate.offset, gate.row_step, &gate.shape[..]), (2, 2, &[512, 1][..]));
}

#[test]
fn experts_that_are_not_as_the_config_says_are_refused() {
    let folder = Folder::new("qwen3_moe", "expert-parts");
    let whole = folder.bytes();
    let expert = "model.layers.2.mlp.experts.7.down_proj.weight";
    let other = |name: &str, to: &str| {
        folder.write(&whole);
        folder.header(|h| {
            let entry = h.remove(name).unwrap();
            h.insert(to.to_owned(), entry);
        });
        folder.refusal()
    };
    let surplus = expert.replace('7', "8");
    assert!(other(expert, &surplus).contains(expert), "one expert too few");
    let router = "model.layers.0.mlp.gate.weight";
    folder.write(&whole);
    folder.header(|h| h[router]["shape"] = json!([4, 128]));
    let text = folder.refusal();
    assert!(text.contains(router) && text.contains("[8, 64]"), "{text}");
    folder.write(&whole);
    folder.header(|h| h[expert]["dtype"] = json!("F16"));
    let text = folder.refusal();
    assert!(text.contains(expert) && text.contains("experts.0.down_proj"), "{text}");
    let folder = Folder::new("gpt_oss_mxfp4", "expert-stacks");
    let whole = folder.bytes();
    for (part, shape) in [
        ("gate_up_proj_blocks", json!([8, 64, 6, 16])),
        ("gate_up_proj_scales", json!([8, 384])),
        ("gate_up_proj_bias", json!([4, 256])),
        ("down_proj_bias", json!([768])),
    ] {
        folder.write(&whole);
        let name = format!("model.layers.1.mlp.experts.{part}");
        folder.header(|h| h[&name]["shape"] = shape);
        let text = folder.refusal();
        assert!(text.contains(&name) && text.contains("wanted"), "{text}");
    }
    // Codes of which the config says nothing.
    folder.write(&whole);
    let config = std::fs::read_to_string(folder.0.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["quantization_config"] = Value::Null;
    std::fs::write(folder.0.join("config.json"), config.to_string()).unwrap();
    assert!(folder.refusal().contains("mlp.experts.gate_up_proj: wanted the tensor"));
}
