//! A device for tests of the engine. Its "model" echoes the prompt over and over when greedy, and
//! otherwise makes tokens of (seed, position, last token). Its "KV" is the token of each position,
//! written to and checked in the very pages that the engine gave out, so a page that is shared,
//! freed or reused wrongly shows as `corrupt`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kie_kernels::abi::{
    CommandKind, Dims, Dtype, PageGroup, Program, Record, SlotEnd, StateKind, PAGE,
};
use kie_kernels::buffer::{Buffer, HostBytes};
use kie_kernels::device::{Device, DeviceInfo, ExactReuse, Gone, Running};
use kie_kernels::mailbox::Mailbox;
use kie_kernels::validate::{validate, ValidProgram};

use super::{Engine, Info, Parts};
use crate::admission::Limits;
use crate::model::Generation;
use crate::primitive::now_ns;
use crate::saved::Identity;
use crate::tokenizer::Tokenizer;

thread_local! {
    /// Allocations and frees of this thread.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    /// Bytes that this thread holds, and the most that it held.
    static HELD: Cell<(i64, i64)> = const { Cell::new((0, 0)) };
}

/// The most bytes that this thread holds at once during `work`, beyond those before.
pub fn peak_bytes<T>(work: impl FnOnce() -> T) -> u64 {
    HELD.set((0, 0));
    drop(work());
    HELD.get().1.unsigned_abs()
}

fn hold(bytes: i64) {
    let (held, most) = HELD.get();
    HELD.set((held + bytes, most.max(held + bytes)));
}

/// The system's allocator, counting by thread.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        hold(layout.size() as i64);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        hold(-(layout.size() as i64));
        unsafe { System.dealloc(at, layout) }
    }
}

/// What a test may turn while the device runs, and what it may look at.
#[derive(Default)]
pub struct Knobs {
    pub pass_us: AtomicU64,
    pub fail: AtomicBool,
    pub panic: AtomicBool,
    pub not_finite: AtomicBool,
    pub passes: AtomicUsize,
    pub prefilled: AtomicUsize,
    /// Of the engine thread; between start and end of a request this device makes none.
    pub allocations: AtomicU64,
    pub parks: AtomicUsize,
    pub stopped: AtomicUsize,
    /// Folder of the engine thread under /proc.
    pub thread: Mutex<std::path::PathBuf>,
    pub corrupt: Mutex<Option<String>>,
}

pub struct Fake(pub Arc<Knobs>);

#[derive(Default)]
struct Slot {
    /// Tokens so far; empty: idle.
    tokens: Vec<u32>,
    fed: usize,
    granted: usize,
    made: u32,
}

struct Work {
    knobs: Arc<Knobs>,
    dims: Dims,
    mailbox: Arc<Mailbox>,
    slots: Vec<Slot>,
    /// Token of each position of each page.
    kv: Vec<[u32; PAGE]>,
}

impl Device for Fake {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: "fake".into(),
            model: "fake".into(),
            blocks: 1,
            memory_bytes: 0,
            free_bytes: 0,
            arch: "fake".into(),
        }
    }

    fn load(&self, bytes: Arc<dyn HostBytes>) -> kie_kernels::Result<Buffer> {
        Ok(Buffer::in_place(bytes))
    }

    fn start(
        &self,
        program: ValidProgram,
        _buffers: Vec<Buffer>,
        mailbox: Arc<Mailbox>,
    ) -> kie_kernels::Result<Box<dyn Running>> {
        let program = program.program();
        let dims = program.dims;
        let thread = std::fs::read_link("/proc/thread-self").unwrap();
        *self.0.thread.lock().unwrap() = std::path::Path::new("/proc").join(thread);
        let slot = Slot::default;
        Ok(Box::new(Work {
            knobs: Arc::clone(&self.0),
            mailbox,
            slots: (0..dims.slots).map(|_| slot()).collect(),
            kv: vec![[u32::MAX; PAGE]; program.groups[0].pages as usize],
            dims,
        }))
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.knobs.stopped.fetch_add(1, Ordering::SeqCst);
    }
}

pub fn next_token(tokens: &[u32], prompt: usize, seed: u64, greedy: bool, vocab: u32) -> u32 {
    if greedy {
        return tokens[tokens.len() - prompt];
    }
    let mut x = seed ^ (tokens.len() as u64) << 32 ^ u64::from(tokens[tokens.len() - 1]);
    x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((x ^ x >> 31) % u64::from(vocab)) as u32
}

impl Work {
    fn commands(&mut self) {
        let mailbox = Arc::clone(&self.mailbox);
        while let Some(command) = mailbox.receive() {
            let index = command.slot as usize;
            match command.kind {
                CommandKind::Start => {
                    let memory = unsafe { self.mailbox.slot_of_device(index) };
                    let p = &memory.params;
                    let mut tokens = memory.tokens[..p.prompt as usize].to_vec();
                    tokens.reserve_exact(p.max_new as usize);
                    let fed = p.cached as usize;
                    self.slots[index] = Slot { tokens, fed, granted: command.a as usize, made: 0 };
                }
                CommandKind::Grow => self.slots[index].granted = command.a as usize,
                CommandKind::Cancel if self.slots[index].tokens.is_empty() => {}
                CommandKind::Cancel => self.end(index, SlotEnd::Cancelled),
                CommandKind::LogitsPrefill | CommandKind::LogitsDecode => {
                    let memory = unsafe { mailbox.slot_of_device(index) };
                    let vocab = self.dims.vocab as usize;
                    let mut all = Vec::new();
                    for at in command.a..command.a + command.b {
                        self.feed(index, memory.tokens[at as usize], at as usize);
                        let mut row = vec![0.0; vocab];
                        row[memory.tokens[at as usize] as usize] = at as f32;
                        all.extend(row);
                    }
                    *unsafe { self.mailbox.logits() } = all.into();
                    self.mailbox.end(index, SlotEnd::Logits);
                }
            }
        }
    }

    fn end(&mut self, index: usize, end: SlotEnd) {
        self.slots[index].tokens = Vec::new();
        self.mailbox.end(index, end);
    }

    fn feed(&mut self, index: usize, token: u32, at: usize) {
        let page = self.mailbox.page(index, 0, at / PAGE);
        self.kv[page as usize][at % PAGE] = token;
    }

    /// Attention: every earlier position must hold its token.
    fn look_back(&self, index: usize, tokens: &[u32]) {
        for (at, token) in tokens.iter().enumerate() {
            let seen = self.kv[self.mailbox.page(index, 0, at / PAGE) as usize][at % PAGE];
            if seen != *token {
                let what = format!("slot {index} position {at}: KV of {seen}, wanted {token}");
                self.knobs.corrupt.lock().unwrap().get_or_insert(what);
            }
        }
    }

    fn step(&mut self, index: usize) {
        let mailbox = Arc::clone(&self.mailbox);
        let memory = unsafe { mailbox.slot_of_device(index) };
        let params = memory.params;
        let mut slot = std::mem::take(&mut self.slots[index]);
        let end = slot.tokens.len().min(slot.fed + self.dims.chunk());
        for at in slot.fed..end {
            self.feed(index, slot.tokens[at], at);
        }
        if slot.made == 0 {
            self.knobs.prefilled.fetch_add(end - slot.fed, Ordering::Relaxed);
        }
        slot.fed = end;
        if end < slot.tokens.len() {
            self.slots[index] = slot;
            return;
        }
        self.look_back(index, &slot.tokens);
        if self.knobs.not_finite.load(Ordering::Relaxed) {
            return self.end(index, SlotEnd::NotFinite);
        }
        let s = params.sampling;
        let prompt = params.prompt as usize;
        let token = next_token(&slot.tokens, prompt, s.seed, s.temperature == 0.0, self.dims.vocab);
        let mut alternatives = [(0, 0.0); kie_kernels::abi::MAX_ALTERNATIVES];
        let alternatives = &mut alternatives[..s.logprobs.saturating_sub(1) as usize];
        for (j, alternative) in alternatives.iter_mut().enumerate() {
            *alternative = (token + j as u32, -(j as f32));
        }
        let record = Record { token, logprob: -0.5, t_ns: now_ns() };
        unsafe {
            mailbox.write_alternatives(index, slot.made as usize, alternatives);
            mailbox.write_record(index, slot.made as usize, record);
        }
        slot.made += 1;
        slot.tokens.push(token);
        self.mailbox.publish(index, slot.made);
        let stops = &memory.stop_ids[..params.stop_ids as usize];
        if stops.contains(&token) && slot.made > params.min_new {
            self.end(index, SlotEnd::StopId);
        } else if slot.made == params.max_new {
            self.end(index, SlotEnd::Length);
        } else {
            self.slots[index] = slot;
        }
    }
}

impl Running for Work {
    fn drive(&mut self, _gone: Gone<'_>) -> kie_kernels::Result<bool> {
        self.commands();
        if self.knobs.fail.load(Ordering::Relaxed) {
            return Err(kie_kernels::Error::Failed("pulled the plug".into()));
        }
        assert!(!self.knobs.panic.load(Ordering::Relaxed), "told to panic");
        let mut busy = false;
        for index in 0..self.slots.len() {
            let slot = &self.slots[index];
            if !slot.tokens.is_empty() && (slot.made == 0 || slot.fed < slot.granted) {
                busy = true;
                self.step(index);
            }
        }
        self.knobs.allocations.store(ALLOCATIONS.get(), Ordering::Relaxed);
        if busy {
            self.knobs.passes.fetch_add(1, Ordering::Relaxed);
            let us = self.knobs.pass_us.load(Ordering::Relaxed);
            if us > 0 {
                std::thread::sleep(Duration::from_micros(us));
            }
        }
        Ok(busy)
    }

    fn park(&mut self) {
        self.knobs.parks.fetch_add(1, Ordering::Relaxed);
    }
}

/// What an engine of the fake is opened with.
pub struct Setup {
    pub slots: u32,
    pub queue: usize,
    pub context: u32,
    pub pages: u32,
    pub template: bool,
    /// In place of the default model's.
    pub tokenizer: Option<Tokenizer>,
    pub exact: Option<ExactReuse>,
}

impl Default for Setup {
    fn default() -> Self {
        let (slots, queue, context, pages) = (4, 64, 2048, 256);
        Self { slots, queue, context, pages, template: true, tokenizer: None, exact: None }
    }
}

pub fn demo() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/kie/demo")
}

/// The default model's tokenizer; without its template where asked.
pub fn tokenizer(template: bool) -> Tokenizer {
    use std::sync::OnceLock;
    static WITH: OnceLock<Tokenizer> = OnceLock::new();
    static WITHOUT: OnceLock<Tokenizer> = OnceLock::new();
    let cell = if template { &WITH } else { &WITHOUT };
    cell.get_or_init(|| {
        if template {
            return Tokenizer::from_dir(&demo(), VOCAB).unwrap();
        }
        let dir = std::env::temp_dir().join(format!("kie-plain-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::copy(demo().join("tokenizer.json"), dir.join("tokenizer.json")).unwrap();
        let config = r#"{"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true}"#;
        std::fs::write(dir.join("tokenizer_config.json"), config).unwrap();
        let plain = Tokenizer::from_dir(&dir, VOCAB).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
        plain
    })
    .clone()
}

pub const VOCAB: usize = 4096;
pub const EOS: u32 = 2;

pub fn open(setup: &Setup) -> (Engine, Arc<Knobs>) {
    let knobs = Arc::new(Knobs::default());
    let device: Arc<dyn Device> = Arc::new(Fake(Arc::clone(&knobs)));
    let dims = Dims {
        hidden: 2,
        lanes: 1,
        vocab: VOCAB as u32,
        eps: 1e-5,
        max_positions: setup.context,
        slots: setup.slots,
        columns: setup.slots + 64,
    };
    let state = StateKind::KeysValues { dtype: Dtype::F32, lanes: 1, kv_heads: 1, head_dim: 2 };
    let program = Program {
        dims,
        blocks: 1,
        steps: vec![],
        tensors: vec![],
        vectors: vec![],
        groups: vec![PageGroup { state, layers: 1, window: None, pages: setup.pages }],
        row_partition: vec![],
    };
    let buffers = vec![];
    let program = validate(program, &buffers).unwrap();
    let generation = Generation { eos: vec![EOS], ..Generation::default() };
    let engine = Engine::start(Parts {
        device,
        program,
        buffers,
        dims,
        tokenizer: setup.tokenizer.clone().unwrap_or_else(|| tokenizer(setup.template)),
        limits: Limits {
            vocab: VOCAB,
            context: setup.context as usize,
            generation,
            refuses_drafts: Some("it is not real"),
            masked_drafts: 0,
            predicts: false,
        },
        prefix_cache: true,
        exact: setup.exact,
        max_queue: setup.queue,
        hot: false,
        info: Info { model: "fake".into(), bytes_per_token: 100, ..Info::default() },
        identity: Identity::default(),
    });
    (engine.unwrap(), knobs)
}
