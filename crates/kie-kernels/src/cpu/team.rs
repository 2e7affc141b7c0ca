//! A persistent thread team: the caller is member 0, the others wait for its jobs.
//!
//! Waiting members spin for a bounded time and then sleep ([`super::barrier`]), so a running team
//! makes no system call and an idle one costs nothing. Invariants: a job's closure is borrowed only
//! while [`Team::run`] is on the stack (it returns after every member has left the closure, also
//! when one panicked); nothing here allocates or locks unless a member panics.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering::*;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use super::barrier::{Broken, Event};
use super::wait::{AtomicBool, AtomicU32};

pub use super::barrier::Barrier;

/// How long members spin for the next job after one has ended.
const JOB_SPIN: Duration = Duration::from_millis(2);
/// How long a member spins at a barrier before it leaves its core to others.
const BARRIER_SPIN: Duration = Duration::from_micros(300);
/// The same where there are more members than cores, and spinning keeps a peer from working.
const CROWDED_SPIN: Duration = Duration::from_micros(3);

/// A borrowed closure without its type.
#[derive(Clone, Copy)]
struct Job {
    closure: *const (),
    call: unsafe fn(*const (), usize, &Barrier),
}

struct Shared {
    /// Grows with each job.
    started: Event,
    /// Grows when the last member other than the caller has left a job.
    finished: Event,
    running: AtomicU32,
    job: UnsafeCell<Option<Job>>,
    barrier: Barrier,
    spin: Duration,
    /// Members shall sleep now rather than spin for the next job.
    parked: AtomicBool,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written by the caller of `run` while no member runs (`busy`, and `running` is
// 0), and read by members after they saw `started` grow. The closure behind it is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer in `job` is used only while `run` holds the closure.
unsafe impl Send for Shared {}

impl Shared {
    /// Runs the job as `member`, carrying a panic to the caller.
    fn work(&self, job: Job, member: usize) {
        // SAFETY: `run` keeps the closure alive until all members are done.
        let body = || unsafe { (job.call)(job.closure, member, &self.barrier) };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(body)) {
            if !panic.is::<Broken>() {
                let mut first = self.panic.lock().unwrap_or_else(|e| e.into_inner());
                first.get_or_insert(panic);
            }
            self.barrier.poison();
        }
    }

    /// The life of members 1 and up.
    fn serve(&self, member: usize) {
        let mut seen = 0;
        loop {
            self.started.wait_past(seen, self.spin, &self.parked);
            seen = seen.wrapping_add(1);
            if self.stop.load(Acquire) {
                return;
            }
            // SAFETY: `started` grew, so the job stands, and nobody writes it while we run.
            let job = unsafe { *self.job.get() };
            self.work(job.expect("a started job was written before"), member);
            if self.running.fetch_sub(1, AcqRel) == 1 {
                self.finished.bump();
            }
        }
    }
}

/// A fixed number of threads that run one closure at a time.
pub struct Team {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    busy: AtomicBool,
    /// The core of each member, where the team is pinned.
    cores: Option<Vec<usize>>,
}

impl Team {
    /// A team of `members` including the caller. With `pin`, and as many allowed cores as members,
    /// each thread stays on its own core; the caller does after [`Team::pin_caller`].
    ///
    /// # Errors
    /// When the system refuses a thread.
    ///
    /// # Panics
    /// For zero members.
    pub fn new(members: usize, pin: bool) -> std::io::Result<Self> {
        assert!(members > 0, "a team has at least one member");
        let cores = allowed_cores();
        let crowded = members > cores.len().max(1);
        let (job, step) =
            if crowded { (CROWDED_SPIN, CROWDED_SPIN) } else { (JOB_SPIN, BARRIER_SPIN) };
        let shared = Arc::new(Shared {
            started: Event::new(),
            finished: Event::new(),
            running: AtomicU32::new(0),
            job: UnsafeCell::new(None),
            barrier: Barrier::new(members as u32, step),
            spin: job,
            parked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let mut team = Self {
            shared,
            threads: Vec::with_capacity(members - 1),
            busy: AtomicBool::new(false),
            cores: (pin && !crowded).then(|| cores.clone()),
        };
        for member in 1..members {
            let shared = Arc::clone(&team.shared);
            // Unpinned members get every core: by default they would inherit a pinned caller's.
            let cores = team.cores.as_ref().map_or(cores.clone(), |cores| vec![cores[member]]);
            let thread = std::thread::Builder::new().name(format!("kie-{member}"));
            team.threads.push(thread.spawn(move || {
                keep_to(&cores);
                shared.serve(member);
            })?);
        }
        Ok(team)
    }

    /// Number of members, the caller included.
    pub fn members(&self) -> usize {
        self.threads.len() + 1
    }

    /// Keeps the calling thread on member 0's core, if the team is pinned.
    pub fn pin_caller(&self) {
        if let Some(cores) = &self.cores {
            keep_to(&cores[..1]);
        }
    }

    /// Runs `body(member, barrier)` on all members and returns when all are done. Every member
    /// must meet the barrier equally often.
    ///
    /// # Panics
    /// With a member's panic, after all have left `body`; when called from within a job.
    pub fn run<F: Fn(usize, &Barrier) + Sync>(&self, body: F) {
        /// Safety: `closure` points to a live `F`.
        unsafe fn call<F: Fn(usize, &Barrier)>(closure: *const (), member: usize, at: &Barrier) {
            // SAFETY: the caller's promise.
            let body = unsafe { &*closure.cast::<F>() };
            body(member, at);
        }
        assert!(!self.busy.swap(true, Acquire), "a team runs one job at a time");
        let shared = &*self.shared;
        let job = Job { closure: std::ptr::from_ref(&body).cast(), call: call::<F> };
        let seen = shared.finished.word.load(Acquire);
        shared.barrier.reset();
        shared.parked.store(false, Relaxed);
        shared.running.store(self.threads.len() as u32, Relaxed);
        // SAFETY: `busy` is ours and all members of the previous job are done.
        unsafe { *shared.job.get() = Some(job) };
        shared.started.bump();
        shared.work(job, 0);
        if !self.threads.is_empty() {
            shared.finished.wait_past(seen, shared.barrier.spin, &shared.barrier.never);
        }
        let panic = shared.barrier.broken.load(Acquire).then(|| {
            let mut first = shared.panic.lock().unwrap_or_else(|e| e.into_inner());
            first.take()
        });
        self.busy.store(false, Release);
        if let Some(Some(panic)) = panic {
            resume_unwind(panic);
        }
    }

    /// Lets the members sleep at once: the caller expects no job soon.
    pub fn park(&self) {
        self.shared.parked.store(true, Relaxed);
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Release);
        self.shared.started.bump();
        for thread in self.threads.drain(..) {
            // A member's panics were carried to `run`; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

/// Cores that this process may run on, ascending, as they were before any team pinned a thread.
fn allowed_cores() -> Vec<usize> {
    static CORES: OnceLock<Vec<usize>> = OnceLock::new();
    CORES.get_or_init(cores_of_thread).clone()
}

#[cfg(target_os = "linux")]
fn cores_of_thread() -> Vec<usize> {
    // SAFETY: an all-zero cpu_set_t is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is as large as we say.
    let rc = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
    if rc != 0 {
        return Vec::new();
    }
    // SAFETY: the index is below CPU_SETSIZE.
    (0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
}

#[cfg(not(target_os = "linux"))]
fn cores_of_thread() -> Vec<usize> {
    (0..std::thread::available_parallelism().map_or(1, usize::from)).collect()
}

/// Keeps this thread on `cores`; a refusal leaves it where the system puts it.
#[cfg(target_os = "linux")]
fn keep_to(cores: &[usize]) {
    // SAFETY: an all-zero cpu_set_t is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &core in cores {
        // SAFETY: `core` came from a set of the same size.
        unsafe { libc::CPU_SET(core, &mut set) };
    }
    // SAFETY: the set is as large as we say; 0 is this thread.
    unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) };
}

#[cfg(not(target_os = "linux"))]
fn keep_to(_cores: &[usize]) {}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn every_member_sees_what_the_others_wrote() {
        for members in [1, 2, 5] {
            let team = Team::new(members, members == 2).unwrap();
            let cells: Vec<AtomicUsize> = (0..members).map(|_| AtomicUsize::new(0)).collect();
            for round in 1..=200 {
                team.run(|member, barrier| {
                    for step in 0..5 {
                        cells[member].store(round * 10 + step, Relaxed);
                        barrier.wait();
                        for cell in &cells {
                            assert_eq!(cell.load(Relaxed), round * 10 + step);
                        }
                        barrier.wait();
                    }
                });
            }
        }
    }

    #[test]
    fn a_parked_team_wakes_up() {
        let team = Team::new(2, false).unwrap();
        let runs = AtomicUsize::new(0);
        for pause_ms in [0, 5, 1, 10] {
            team.park();
            std::thread::sleep(Duration::from_millis(pause_ms));
            team.run(|_, barrier| {
                barrier.wait();
                runs.fetch_add(1, Relaxed);
            });
        }
        assert_eq!(runs.load(Relaxed), 8);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        for members in [1, 2, 5] {
            let team = Team::new(members, false).unwrap();
            for culprit in 0..members {
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    team.run(|member, barrier| {
                        barrier.wait();
                        if member == culprit {
                            resume_unwind(Box::new(format!("member {member}")));
                        }
                        barrier.wait();
                    });
                }));
                let panic = outcome.unwrap_err();
                assert_eq!(*panic.downcast::<String>().unwrap(), format!("member {culprit}"));
            }
            let runs = AtomicUsize::new(0);
            team.run(|_, barrier| {
                barrier.wait();
                runs.fetch_add(1, Relaxed);
            });
            assert_eq!(runs.load(Relaxed), members);
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_idle_team_uses_no_processor() {
        let team = Team::new(2, false).unwrap();
        let clock = Mutex::new(0);
        team.run(|member, _| {
            if member == 1 {
                // SAFETY: no arguments but this thread.
                *clock.lock().unwrap() = unsafe { libc::pthread_self() };
            }
        });
        let used = || {
            let mut id = 0;
            // SAFETY: member 1 lives as long as the team.
            unsafe { libc::pthread_getcpuclockid(*clock.lock().unwrap(), &mut id) };
            let mut at = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: a valid clock and a place for its time.
            unsafe { libc::clock_gettime(id, &mut at) };
            at.tv_sec * 1_000_000_000 + at.tv_nsec
        };
        std::thread::sleep(Duration::from_millis(50));
        let before = used();
        std::thread::sleep(Duration::from_millis(300));
        assert!(used() - before < 3_000_000, "{} ns of processor time while idle", used() - before);
    }
}
