//! Machines that are not at hand: one with chiplets is simulated as its file describes it, others
//! are planned for; and what machines truly hold is what the plan says.

use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

use kie_core::dry_run::{DryRun, Share};
use kie_core::engine::{Engine, LogitsPath};
use kie_core::request::EngineConfig;
use kie_core::Error;
use kie_kccl::Topology;
use kie_kernels::device::Options;
use kie_kernels::machine::{Flight, Launch, Machine, Memory, Module, Source};
use kie_kernels::mono::Mono;
use kie_kernels::sim;
use safetensors::tensor::{Dtype, TensorView};

use super::support::{goldens, open_on, repository};
use super::{check, fixture, two_at_a_time, Job};

/// A recorded machine's file.
fn recorded(name: &str) -> String {
    let file = repository().join("crates/kie-kccl/topologies").join(format!("{name}.json"));
    file.to_str().unwrap().to_owned()
}

/// Of eight MI300X two run four lanes, four a dense model whose kv heads they share, and one
/// another alone: waves of 64, blocks dealt out among eight XCDs, which do not always divide them.
#[test]
fn machines_of_chiplets_run_the_fixtures() {
    let file = recorded("mi300xx8");
    let all = [("laneformer_d2", 2, 16), ("llama", 1, 11), ("qwen2", 4, 9)];
    let job = |(at, (name, ranks, blocks)): (usize, (&str, u32, u32))| Job {
        folder: fixture(name),
        device: format!("sim:topology={file},ranks={ranks},blocks={blocks},seed={at}"),
        prompt: 24,
        positions: 4,
        tokens: 4,
    };
    two_at_a_time(all.into_iter().enumerate().map(job).collect(), |job| check(&job));
}

#[test]
fn placement_changes_no_bit() {
    let folder = fixture("laneformer_d2");
    let golden = &goldens(&folder, "")[1];
    let logits = |chiplets: u32| {
        let device = format!("sim:seed=3,warp=64,blocks=16,chiplets={chiplets}");
        let engine = open_on(&folder, &device);
        let plan = engine.info().plan;
        let told = "placed    8 chiplets: lane 0 on 0 to 1, lane 1 on 2 to 3, lane 2 on 4 to 5, \
                    lane 3 on 6 to 7\n";
        assert_eq!(plan.contains("placed"), chiplets > 1, "{plan}");
        assert!(chiplets == 1 || plan.contains(told), "{plan}");
        engine.logits(&golden.ids, LogitsPath::Prefill).unwrap().values
    };
    let (dealt, placed) = (logits(1), logits(8));
    assert!(dealt.iter().zip(&placed).all(|(a, b)| a.to_bits() == b.to_bits()));
}

/// A machine that counts what is allocated on it.
struct Counted {
    machine: Arc<dyn Machine>,
    /// Owners and bytes of what was allocated.
    given: Mutex<Vec<(Weak<dyn Any + Send + Sync>, u64)>>,
}

impl Counted {
    fn count(&self, memory: Memory) -> Memory {
        let owner = Arc::downgrade(&memory.owner);
        self.given.lock().unwrap().push((owner, memory.bytes as u64));
        memory
    }

    /// Bytes that somebody still has.
    fn held(&self) -> u64 {
        let given = self.given.lock().unwrap();
        given.iter().filter(|(owner, _)| owner.strong_count() > 0).map(|(_, bytes)| bytes).sum()
    }
}

impl Machine for Counted {
    as_the_machine_does!();
    fn compile(&self, source: &Source) -> kie_kernels::Result<Arc<dyn Module>> {
        self.machine.compile(source)
    }
    fn alloc(&self, bytes: usize) -> kie_kernels::Result<Memory> {
        Ok(self.count(self.machine.alloc(bytes)?))
    }
    fn alloc_symmetric(&self, bytes: usize) -> kie_kernels::Result<Memory> {
        Ok(self.count(self.machine.alloc_symmetric(bytes)?))
    }
    fn launch(
        &self,
        module: &Arc<dyn Module>,
        launch: &Launch<'_>,
    ) -> kie_kernels::Result<Box<dyn Flight>> {
        self.machine.launch(module, launch)
    }
}

/// What the plan says that each rank holds, and what it has been given when all is loaded.
fn held(folder: &Path, device: &str, config: &EngineConfig, prefill: bool) -> Vec<(Share, u64)> {
    let count = |machine| Arc::new(Counted { machine, given: Mutex::default() });
    let machines: Vec<_> = sim::ranks::open(device).unwrap().into_iter().map(count).collect();
    let shared = |machine: &Arc<Counted>| Arc::clone(machine) as Arc<dyn Machine>;
    let all = machines.iter().map(shared).collect();
    let options = Options { prefill_kernel: Some(prefill), ..Options::default() };
    let runner = Arc::new(Mono::new(device, all, &options).unwrap());
    let builder = || {
        let config = EngineConfig { device: device.to_owned(), ..config.clone() };
        Engine::builder(folder).config(config).runner(runner.clone())
    };
    let told = builder().plan(None).unwrap().ranks;
    let engine = builder().build().unwrap();
    engine.warmup().unwrap();
    told.into_iter().zip(machines.iter().map(|machine| machine.held())).collect()
}

/// Ten small lists, each in a line of its own.
const SLACK_BYTES: u64 = 10 * 256;

#[test]
fn machines_hold_what_the_plan_says() {
    let few = EngineConfig { max_batch: 1, ..EngineConfig::default() };
    let many = EngineConfig { max_batch: 64, ..EngineConfig::default() };
    for (name, device, prefill) in [
        ("llama", "sim:blocks=8", false),
        ("laneformer_d2", "sim:ranks=2,blocks=8", false),
        ("own_llama_fp8_tied", "sim:ranks=3,blocks=8", false),
        ("qwen2", "sim:ranks=4,blocks=4", false),
        ("qwen3", "sim:ranks=2,blocks=8", true),
    ] {
        for config in [&few, &many] {
            let all = held(&fixture(name), device, config, prefill);
            for (rank, (told, got)) in all.into_iter().enumerate() {
                let need = told.weight_bytes + told.kv_bytes + told.scratch_bytes;
                let line = format!("{name} {device} rank {rank}: has {got} of {need}, {told:?}");
                assert!(got <= need + SLACK_BYTES, "{line}");
                // Loading a small thing takes more for a while than it has in the end.
                assert!(config.max_batch == 1 || need <= got + SLACK_BYTES, "{line}");
            }
        }
    }
}

/// A checkpoint of one layer with 16 query heads and 2 kv heads, its numbers drawn, that goes with
/// this.
pub struct Grouped(pub PathBuf);

impl Drop for Grouped {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Grouped {
    pub fn new(name: &str) -> Self {
        let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "attention_bias": false, "mlp_bias": false, "hidden_act": "silu", "rms_norm_eps": 1e-05,
            "vocab_size": 512, "max_position_embeddings": 512, "rope_theta": 10000.0,
            "torch_dtype": "float16", "tie_word_embeddings": false, "hidden_size": 512,
            "num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 2,
            "intermediate_size": 1024}"#;
        let layer = |name: &str| format!("model.layers.0.{name}.weight");
        let mlp = [
            (layer("mlp.gate_proj"), vec![1024, 512]),
            (layer("mlp.up_proj"), vec![1024, 512]),
            (layer("mlp.down_proj"), vec![512, 1024]),
        ];
        Self::of(name, config, [512, 512, 64], mlp.into())
    }

    /// Four experts, of which a token goes to two; eight heads.
    pub fn experts(name: &str) -> Self {
        let config = r#"{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
            "hidden_act": "silu", "rms_norm_eps": 1e-05, "vocab_size": 512,
            "max_position_embeddings": 512, "rope_theta": 10000.0, "torch_dtype": "float16",
            "tie_word_embeddings": false, "hidden_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16,
            "sliding_window": null, "intermediate_size": 96, "num_local_experts": 4,
            "num_experts_per_tok": 2}"#;
        let layer = |name: &str| format!("model.layers.0.block_sparse_moe.{name}.weight");
        let expert = |id: usize| {
            let of = move |name: &str| layer(&format!("experts.{id}.{name}"));
            [(of("w1"), vec![96, 64]), (of("w3"), vec![96, 64]), (of("w2"), vec![64, 96])]
        };
        let router = (layer("gate"), vec![4, 64]);
        let mlp = std::iter::once(router).chain((0..4).flat_map(expert)).collect();
        Self::of(name, config, [64, 128, 128], mlp)
    }

    /// One layer: its width, that of its queries and of its keys, the tensors of its mlp.
    fn of(
        name: &str,
        config: &str,
        [hidden, query, kv]: [usize; 3],
        mlp: Vec<(String, Vec<usize>)>,
    ) -> Self {
        let name = format!("kie-grouped-{name}-{}", std::process::id());
        let this = Self(std::env::temp_dir().join(name));
        std::fs::create_dir_all(&this.0).unwrap();
        std::fs::write(this.0.join("config.json"), config).unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(fixture("llama").join(file), this.0.join(file)).unwrap();
        }
        // Small numbers that look random.
        let mut source = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            source ^= source << 13;
            source ^= source >> 7;
            source ^= source << 17;
            half::f16::from_f32(((source >> 40) as f32 / (1 << 24) as f32 - 0.5) * 0.2)
        };
        let numbers: Vec<u8> = (0..1024 * 512).flat_map(|_| next().to_le_bytes()).collect();
        let layer = |name: &str| format!("model.layers.0.{name}.weight");
        let rest = [
            ("model.embed_tokens.weight".to_owned(), vec![512, hidden]),
            (layer("input_layernorm"), vec![hidden]),
            (layer("self_attn.q_proj"), vec![query, hidden]),
            (layer("self_attn.k_proj"), vec![kv, hidden]),
            (layer("self_attn.v_proj"), vec![kv, hidden]),
            (layer("self_attn.o_proj"), vec![hidden, query]),
            (layer("post_attention_layernorm"), vec![hidden]),
            ("model.norm.weight".to_owned(), vec![hidden]),
            ("lm_head.weight".to_owned(), vec![512, hidden]),
        ];
        let view = |(at, (name, shape)): (usize, (String, Vec<usize>))| {
            let from = if hidden < 512 { at << 14 } else { 0 };
            let bytes = &numbers[from..from + 2 * shape.iter().product::<usize>()];
            (name, TensorView::new(Dtype::F16, shape, bytes).unwrap())
        };
        let file = this.0.join("model.safetensors");
        let all = rest.into_iter().chain(mlp).enumerate();
        safetensors::serialize_to_file(all.map(view), None, &file).unwrap();
        this
    }
}

/// What a plan for a recorded machine's GPUs says.
fn planned(folder: &Path, machine: &str, config: EngineConfig) -> kie_core::Result<DryRun> {
    Engine::builder(folder).config(config).plan(Some(Path::new(&recorded(machine))))
}

#[test]
fn kv_heads_that_ranks_share_are_counted_on_each() {
    let model = Grouped::new("kv");
    let on = |devices: &str, kv_bytes| {
        let config = EngineConfig { device: devices.into(), kv_bytes, ..EngineConfig::default() };
        planned(&model.0, "mi300xx8", config)
    };
    let kv = |plan: &DryRun| plan.ranks.iter().map(|rank| rank.kv_bytes).collect::<Vec<_>>();
    let one = on("hip:0", None).unwrap();
    // 8 sequences of 512 positions, keys and values of 2 heads of 32 as halves.
    let whole = 8 * 512 * 2 * 2 * 32 * 2;
    assert_eq!(kv(&one), [whole]);
    assert_eq!(kv(&on("hip:0,1", None).unwrap()), [whole / 2; 2]);
    let eight = on("auto", None).unwrap();
    assert_eq!(kv(&eight), [whole / 2; 8], "each has one of the two");
    for (rank, share) in eight.ranks.iter().enumerate() {
        let wanted =
            format!("heads {} to {} of 16, kv heads {} of 2", 2 * rank, 2 * rank + 1, rank / 4);
        assert!(share.part.starts_with(&wanted), "{wanted}: {}", share.part);
        assert!(eight.plan.contains(&format!("rank {rank}: {}", share.part)), "{}", eight.plan);
    }
    assert!(eight.plan.contains(&format!("+ KV {:.1} MB (4096 positions)", 4e-6 * whole as f64)));
    // A rank's weights are a part of all, and those of all ranks are more than the file's.
    let weights = |plan: &DryRun| plan.ranks.iter().map(|rank| rank.weight_bytes).sum::<u64>();
    assert!(weights(&eight) > weights(&one) && eight.ranks[0].weight_bytes < weights(&one) / 2);
    // A budget is for all ranks together: four times the bytes hold the same positions.
    let budget = |devices, kv_bytes| {
        let plan = on(devices, Some(kv_bytes)).unwrap();
        assert!(kv(&plan).iter().sum::<u64>() <= kv_bytes, "{}", plan.plan);
        plan.plan.split(" positions)").next().unwrap().rsplit('(').next().unwrap().to_owned()
    };
    assert_eq!(budget("hip:0", whole / 2), "2048");
    assert_eq!(budget("auto", whole / 2 * 4), "2048");
    let short = on("auto", Some(whole / 8)).unwrap_err();
    assert!(matches!(short, Error::InvalidRequest(_)), "{short}");
    assert!(short.to_string().contains("kv_bytes must be at least"), "{short}");
}

#[test]
fn one_short_machine_is_enough_to_refuse() {
    let model = Grouped::new("plan");
    let mut topology = Topology::load(Path::new(&recorded("h200x4"))).unwrap();
    let file = model.0.join("short.json");
    let plan = |topology: &Topology| {
        topology.save(&file).unwrap();
        let config = EngineConfig { device: "cuda:0,2".into(), ..EngineConfig::default() };
        Engine::builder(&model.0).config(config).plan(Some(&file))
    };
    assert!(plan(&topology).is_ok());
    topology.gpus[3].memory_bytes = 1 << 20;
    assert!(plan(&topology).is_ok(), "not one of those that are named");
    topology.gpus[2].memory_bytes = 1 << 20;
    let error = plan(&topology).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
}

#[test]
fn files_of_machines_are_refused_by_name() {
    let nowhere = Path::new("/nowhere.json");
    let plan = |file: &Path, device: &str| {
        Engine::builder(fixture("llama")).device(device).plan(Some(file)).unwrap_err()
    };
    let error = plan(nowhere, "auto");
    assert!(matches!(&error, Error::Topology { path, .. } if path == nowhere), "{error}");
    let h200 = recorded("h200x4");
    for (device, wanted) in [("hip:0", "device hip:0: wanted one of cuda:0"), ("cpu", "cpu:0")] {
        let error = plan(Path::new(&h200), device);
        assert!(matches!(error, Error::Topology { .. }), "{error}");
        assert!(error.to_string().contains(wanted), "{error}");
    }
    let device = "sim:ranks=2,topology=/nowhere.json";
    let error = Engine::builder(fixture("llama")).device(device).build().err().unwrap();
    assert!(matches!(error, Error::Topology { .. }), "{error}");
    // What has no plan says so, whatever machine it is for.
    let error = plan(Path::new(&recorded("mi300xx8")), "auto");
    assert!(error.to_string().contains("do not divide by 8 ranks"), "{error}");
}

#[test]
fn plans_for_machines_that_are_not_at_hand() {
    for (machine, name, ranks, told) in [
        ("h200x4", "laneformer_d2", 4, "cuda:0,1,2,3 (4 x NVIDIA H200), 132 blocks, sm_90a"),
        ("mi300xx8", "own_laneformer_mixed", 8, "(8 x AMD MI300X), 304 blocks, gfx942"),
        ("pcie4", "llama", 4, "cuda:0,1,2,3 (4 x RTX PRO 6000), 188 blocks, sm_120"),
    ] {
        let plan = planned(&fixture(name), machine, EngineConfig::default()).unwrap();
        let golden = recorded(machine).replace(".json", ".plan");
        assert_eq!(plan.algorithms, std::fs::read_to_string(golden).unwrap(), "{machine}");
        assert!(plan.plan.contains(told), "{machine}: {}", plan.plan);
        assert_eq!(plan.ranks.len(), ranks);
        let parts: Vec<_> = plan.ranks.iter().map(|rank| rank.part.as_str()).collect();
        let first = ["lanes 0 of 4", "lanes 0 of 8", "heads 0 to 1 of 6, kv heads 0 of 2"];
        assert!(first.iter().any(|wanted| parts[0].starts_with(wanted)), "{parts:?}");
        assert!((1..ranks).all(|rank| parts[rank] != parts[0]), "{parts:?}");
        assert_eq!(plan.plan.contains("placed    8 chiplets"), machine == "mi300xx8");
    }
}
