//! What the tests over fixtures share.

#![allow(dead_code, unused_macros, clippy::unwrap_used)]

/// In an `impl Machine`: what a machine of tests leaves to the `machine` that it wraps.
macro_rules! as_the_machine_does {
    () => {
        fn platform(&self) -> kie_kernels::machine::Platform {
            self.machine.platform()
        }
        fn warp(&self) -> u32 {
            self.machine.warp()
        }
        fn info(&self) -> kie_kernels::Result<kie_kernels::machine::MachineInfo> {
            self.machine.info()
        }
        fn alloc_shared(&self, bytes: usize) -> kie_kernels::Result<kie_kernels::machine::Shared> {
            self.machine.alloc_shared(bytes)
        }
        fn write(&self, to: &Memory, offset: usize, bytes: &[u8]) -> kie_kernels::Result<()> {
            self.machine.write(to, offset, bytes)
        }
        fn read(&self, from: &Memory, offset: usize, out: &mut [u8]) -> kie_kernels::Result<()> {
            self.machine.read(from, offset, out)
        }
        fn launch_alone(
            &self,
            module: &Arc<dyn Module>,
            launch: &Launch<'_>,
        ) -> kie_kernels::Result<Box<dyn Flight>> {
            self.machine.launch_alone(module, launch)
        }
        fn peer(&self) -> kie_kernels::Result<kie_kernels::machine::Peer> {
            self.machine.peer()
        }
        fn reaches(&self, other: &dyn Machine) -> kie_kernels::Result<bool> {
            self.machine.reaches(other)
        }
        fn enable_peer(&self, other: &dyn Machine) -> kie_kernels::Result<()> {
            self.machine.enable_peer(other)
        }
    };
}

pub mod prompts;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kie_core::engine::Engine;
use kie_core::request::{EngineConfig, Prompt, Request, SamplingParams};
use kie_core::Builder;
use kie_kernels::abi::{Encoding, PageGroup};
use kie_kernels::buffer::{Buffer, HostBytes};
use kie_kernels::device::{Device, DeviceInfo, ExactReuse, Options, Running};
use kie_kernels::mailbox::Mailbox;
use kie_kernels::validate::ValidProgram;
use safetensors::SafeTensors;

/// One prompt of a fixture.
pub struct Golden {
    pub ids: Vec<u32>,
    /// A row a position: all columns, or evenly spaced ones from the first.
    logits: Vec<f32>,
    /// All logits behind the last position.
    pub last: Vec<f32>,
    pub generated: Vec<u32>,
}

impl Golden {
    /// The relative L2 error of the logits at the first positions, in the columns recorded.
    pub fn error(&self, ours: &[f32]) -> f64 {
        let (vocab, width) = (self.last.len(), self.logits.len() / self.ids.len());
        assert_eq!(ours.len() % vocab, 0);
        let stride = vocab.div_ceil(width);
        let rows = ours.chunks_exact(vocab);
        let picked: Vec<f32> = rows.flat_map(|row| row.iter().step_by(stride)).copied().collect();
        assert_eq!(picked.len(), ours.len() / vocab * width);
        relative(&picked, &self.logits[..picked.len()])
    }
}

/// An empty folder that goes away.
pub struct Folder(pub PathBuf);

impl Folder {
    /// One of that name in this process.
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kie-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

pub fn fixtures() -> Vec<PathBuf> {
    let mut roots = vec![repository().join("tests/data")];
    roots.extend(std::env::var_os("KIE_FIXTURES").map(PathBuf::from));
    let folders = roots.iter().flat_map(|root| root.read_dir().unwrap()).map(|e| e.unwrap().path());
    let mut folders: Vec<_> = folders.filter(|f| supported(f)).collect();
    folders.sort();
    folders.dedup_by_key(|f| f.file_name().unwrap().to_owned());
    assert!(folders.len() >= 10, "the repository carries at least ten: {folders:?}");
    folders
}

/// A fixture of an architecture that kie has.
pub fn supported(folder: &Path) -> bool {
    let Ok(config) = std::fs::read(folder.join("config.json")) else { return false };
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let mut known = kie_core::model::architectures();
    folder.join("golden.safetensors").exists() && known.any(|k| config["model_type"] == *k)
}

/// What is recorded. `prefix` chooses among recordings of one checkpoint: `bf16w.` has the weights
/// rounded to bfloat16 first.
pub fn goldens(folder: &Path, prefix: &str) -> Vec<Golden> {
    let bytes = std::fs::read(folder.join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| -> Option<Vec<[u8; 4]>> {
        let tensor = file.tensor(name).ok()?;
        Some(tensor.data().chunks_exact(4).map(|w| w.try_into().unwrap()).collect())
    };
    let ids = |name: &str| -> Option<Vec<u32>> {
        Some(words(name)?.into_iter().map(u32::from_le_bytes).collect())
    };
    let floats = |name: &str| -> Option<Vec<f32>> {
        Some(words(name)?.into_iter().map(f32::from_le_bytes).collect())
    };
    (0..)
        .map_while(|i| {
            let ids_of = ids(&format!("prompt_{i}.ids"))?;
            let logits = floats(&format!("{prefix}prompt_{i}.logits")).unwrap_or_default();
            let last_row = || logits[logits.len() - logits.len() / ids_of.len()..].to_vec();
            let last = floats(&format!("{prefix}prompt_{i}.last_logits")).unwrap_or_else(last_row);
            Some(Golden {
                ids: ids_of,
                logits,
                last,
                generated: ids(&format!("{prefix}prompt_{i}.gen_ids")).unwrap_or_default(),
            })
        })
        .filter(|golden| !golden.logits.is_empty())
        .collect()
}

pub fn relative(ours: &[f32], golden: &[f32]) -> f64 {
    assert_eq!(ours.len(), golden.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let error = norm(&mut ours.iter().zip(golden).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    error / norm(&mut golden.iter().map(|b| f64::from(*b)))
}

/// Asks for so many of the likeliest tokens, and no fewer.
pub fn greedy_request(ids: &[u32], count: usize) -> Request {
    let params = SamplingParams {
        max_tokens: Some(count),
        temperature: Some(0.0),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    Request { prompt: Prompt::Ids(ids.to_vec()), params }
}

pub fn greedy(engine: &Engine, ids: &[u32], count: usize) -> Vec<u32> {
    engine.generate(greedy_request(ids, count)).unwrap().token_ids
}

/// The fixture's engine on a device.
pub fn open_on(folder: &Path, device: &str) -> Engine {
    let config = EngineConfig { max_batch: 4, ..EngineConfig::default() };
    let dtype = if device.starts_with("cpu") { "auto" } else { half(folder) };
    let builder = Engine::builder(folder).config(config).dtype(dtype);
    let usual = Options { prefill_kernel: Some(false), ..Options::default() };
    let builder = match device.starts_with("gcn") {
        true => on_gcn(builder, device, &usual),
        false => builder.device(device),
    };
    builder.build().unwrap()
}

/// On the emulator of gfx942, which no engine finds by its name.
#[cfg(target_os = "linux")]
fn on_gcn(builder: Builder, device: &str, options: &Options) -> Builder {
    let machines = kie_gcn::ranks::open(device).unwrap();
    builder.runner(kie_kernels::devices::of_machines(device, machines, options).unwrap())
}

#[cfg(not(target_os = "linux"))]
fn on_gcn(builder: Builder, device: &str, _: &Options) -> Builder {
    builder.device(device)
}

/// The `dtype` with which a checkpoint opens on a GPU: float32 is asked to be rounded.
pub fn half(folder: &Path) -> &'static str {
    if float32(folder) {
        "bf16"
    } else {
        "auto"
    }
}

/// Whether all weights are float32.
pub fn float32(folder: &Path) -> bool {
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let single = file.iter().all(|(_, t)| t.dtype() == safetensors::Dtype::F32);
    single
}

/// The signal that a fork of this process ends with when it runs `f`; none if it gets to its end.
pub fn ended_by(f: impl FnOnce()) -> Option<i32> {
    // SAFETY: the child runs `f`, which a test keeps to what a fork may do, and leaves.
    let child = unsafe { libc::fork() };
    if child == 0 {
        f();
        // SAFETY: ends the child at once, without running anything of the parent's.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(child, &mut status, 0) };
    libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status))
}

/// A device whose runs are what a function makes of another's, and whether it says that it checks
/// drafts beside masks where that one does.
pub struct Around<F>(pub Arc<dyn Device>, pub F, pub bool);

impl<F: Fn(Box<dyn Running>) -> Box<dyn Running> + Send + Sync> Device for Around<F> {
    fn info(&self) -> DeviceInfo {
        self.0.info()
    }

    fn load(&self, bytes: Arc<dyn HostBytes>) -> kie_kernels::Result<Buffer> {
        self.0.load(bytes)
    }

    fn carries(&self, encoding: &Encoding) -> bool {
        self.0.carries(encoding)
    }

    fn rounds_f32(&self) -> bool {
        self.0.rounds_f32()
    }

    fn page_bytes(&self, group: &PageGroup) -> u64 {
        self.0.page_bytes(group)
    }

    fn refuses_drafts(&self, program: &ValidProgram) -> Option<&'static str> {
        self.0.refuses_drafts(program)
    }

    fn masked_drafts(&self, program: &ValidProgram) -> usize {
        if self.2 {
            self.0.masked_drafts(program)
        } else {
            0
        }
    }

    fn exact_reuse(&self, program: &ValidProgram) -> kie_kernels::Result<ExactReuse> {
        self.0.exact_reuse(program)
    }

    fn start(
        &self,
        program: ValidProgram,
        buffers: Vec<Buffer>,
        mailbox: Arc<Mailbox>,
    ) -> kie_kernels::Result<Box<dyn Running>> {
        Ok((self.1)(self.0.start(program, buffers, mailbox)?))
    }
}
