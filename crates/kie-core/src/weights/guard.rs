//! What a read of a mapped file meets where the file was cut short, or its disk fails: SIGBUS,
//! which ends the process. While a file is guarded it meets zeros instead, and the guard
//! remembers; who loads asks at the end and throws away what was made of them.
//!
//! Invariants: guarded ranges are found without a lock, in a list that only grows (its entries are
//! used again), so the handler may run anywhere, also inside itself on another thread; what is no
//! guarded address goes to whoever handled the signal before.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::OnceLock;

/// A range of addresses; `start` is 0 where it is nobody's and 1 while it changes hands.
struct Range {
    start: AtomicUsize,
    end: AtomicUsize,
    cut: AtomicBool,
    next: *const Range,
}

// SAFETY: `next` is written before the entry is published and never again; entries are never freed.
unsafe impl Sync for Range {}

static FIRST: AtomicPtr<Range> = AtomicPtr::new(ptr::null_mut());
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Guards a mapped range as long as it lives, which must end before the mapping does.
pub(super) struct Guard(&'static Range);

impl Guard {
    /// Over mapped bytes of a file.
    pub(super) fn over(bytes: &[u8]) -> Self {
        install();
        let (start, end) = (bytes.as_ptr() as usize, bytes.as_ptr_range().end as usize);
        let range = all().find(|range| range.claim()).unwrap_or_else(publish);
        range.cut.store(false, Ordering::Relaxed);
        range.end.store(end, Ordering::Relaxed);
        range.start.store(start, Ordering::Release);
        Self(range)
    }

    /// Whether something of the range could not be read.
    pub(super) fn is_cut(&self) -> bool {
        self.0.cut.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.start.store(0, Ordering::Release);
    }
}

impl Range {
    fn claim(&self) -> bool {
        self.start.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
}

fn all() -> impl Iterator<Item = &'static Range> {
    let mut at = FIRST.load(Ordering::Acquire).cast_const();
    std::iter::from_fn(move || {
        // SAFETY: null, or an entry that was published whole and is never freed.
        let range = unsafe { at.as_ref() }?;
        at = range.next;
        Some(range)
    })
}

/// A new entry, claimed.
fn publish() -> &'static Range {
    let mut first = FIRST.load(Ordering::Acquire);
    loop {
        let (start, end) = (AtomicUsize::new(1), AtomicUsize::new(0));
        let range = Range { start, end, cut: AtomicBool::new(false), next: first };
        let range = Box::into_raw(Box::new(range));
        match FIRST.compare_exchange(first, range, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: it was just made and is never freed from now on.
            Ok(_) => return unsafe { &*range },
            Err(other) => {
                first = other;
                // SAFETY: made above and seen by nobody.
                drop(unsafe { Box::from_raw(range) });
            }
        }
    }
}

/// Handles SIGBUS from now on.
fn install() {
    BEFORE.get_or_init(|| {
        // SAFETY: all zeros are a valid sigaction, filled in below or by the kernel.
        let (mut ours, mut before): (libc::sigaction, libc::sigaction) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        ours.sa_sigaction = on_bus_error as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        // SAFETY: both live for the calls; the handler does only what a handler may.
        unsafe {
            libc::sigaction(libc::SIGBUS, ptr::null(), &mut before);
            libc::sigaction(libc::SIGBUS, &ours, ptr::null_mut());
        }
        before
    });
}

extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel hands over a valid siginfo; for SIGBUS of a fault it holds an address.
    let (code, at) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code > 0 {
        for range in all() {
            let start = range.start.load(Ordering::Acquire);
            let end = range.end.load(Ordering::Relaxed);
            if start > 1 && (start..end).contains(&at) && put_zeros(at, end) {
                range.cut.store(true, Ordering::Release);
                return;
            }
        }
    }
    pass_on(signal, info, context);
}

/// Where this thread's errno is.
fn errno_place() -> *mut c_int {
    // SAFETY: takes no arguments and is safe in a signal handler.
    #[cfg(target_os = "linux")]
    unsafe {
        libc::__errno_location()
    }
    // SAFETY: as above.
    #[cfg(not(target_os = "linux"))]
    unsafe {
        libc::__error()
    }
}

/// Zeros from the page of `at` to the end of its mapping: a file that is cut is gone from there on.
fn put_zeros(at: usize, end: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the place of errno belongs to this thread; the interrupted code may be about to read
    // it. The pages replaced are of a mapping that its guard's owner keeps and only reads.
    unsafe {
        let errno = *errno_place();
        let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
        let from = at / page * page;
        let length = (end - from).next_multiple_of(page);
        let got = libc::mmap(from as *mut c_void, length, libc::PROT_READ, flags, -1, 0);
        *errno_place() = errno;
        got != libc::MAP_FAILED
    }
}

type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
type Plain = extern "C" fn(c_int);

/// To whoever handled the signal before; nobody: the process ends as it would have.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let before = BEFORE.get().map_or((libc::SIG_DFL, 0), |b| (b.sa_sigaction, b.sa_flags));
    match before {
        (libc::SIG_DFL | libc::SIG_IGN, _) => {
            // SAFETY: takes no pointers; the signal comes again when this handler returns.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                libc::raise(signal);
            }
        }
        (handler, flags) if flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with SA_SIGINFO the word is a function of this type.
            let handler = unsafe { std::mem::transmute::<usize, Handler>(handler) };
            handler(signal, info, context);
        }
        (handler, _) => {
            // SAFETY: without SA_SIGINFO the word is a function of this type.
            let handler = unsafe { std::mem::transmute::<usize, Plain>(handler) };
            handler(signal);
        }
    }
}
