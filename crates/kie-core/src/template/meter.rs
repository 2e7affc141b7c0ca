//! What one rendering may cost, whatever the template does.
//!
//! Invariants: every operation is charged before it runs, in proportion to what it reads and
//! writes, so that neither time nor memory exceeds [`WORK_MAX`] by more than one operation that was
//! paid for; no value that a variable holds is nested deeper than [`DEPTH_MAX`], so that whatever
//! recurses over values (comparing, printing, dropping) fits the stack; charging notices that the
//! caller gave up.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use kie_kernels::device::Stop;
use minijinja::tests::is_sameas;
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Units of work: about a byte read or written. A chat of 4 MB takes a hundredth.
const WORK_MAX: u64 = 1 << 29;
/// What an item of a list or a map counts for.
pub(super) const ITEM: u64 = 32;
/// Bytes of text that are written, captured ones included.
const TEXT_BYTES_MAX: u64 = 64 << 20;
/// Longest time of a rendering. Of a long chat it is milliseconds.
pub(super) const TIME_MAX: Duration = Duration::from_secs(10);
/// Lists in lists; JSON has 128 at most.
pub(super) const DEPTH_MAX: usize = 160;
/// Namespaces of a template; each has a few.
const NAMESPACES_MAX: usize = 64;

type Result<T> = std::result::Result<T, Error>;

/// What is left of one rendering's budget.
struct Budget {
    work: Cell<u64>,
    text: Cell<u64>,
    until: Instant,
    given_up: Stop,
    namespaces: RefCell<Vec<Value>>,
}

thread_local! {
    static BUDGET: RefCell<Option<Budget>> = const { RefCell::new(None) };
}

/// Meters this thread from now on.
pub(super) fn begin(given_up: Stop) {
    let budget = Budget {
        work: Cell::new(WORK_MAX),
        text: Cell::new(TEXT_BYTES_MAX),
        until: Instant::now() + TIME_MAX,
        given_up,
        namespaces: RefCell::default(),
    };
    BUDGET.with(|cell| *cell.borrow_mut() = Some(budget));
}

fn refused(what: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// The error of a template that takes too long.
pub(super) fn too_long() -> String {
    format!("takes more than {} s", TIME_MAX.as_secs())
}

/// Pays for work; a thread that is not metered pays nothing.
pub(crate) fn spend(work: u64) -> Result<()> {
    BUDGET.with(|cell| {
        let budget = cell.borrow();
        let Some(budget) = &*budget else { return Ok(()) };
        let Some(left) = budget.work.get().checked_sub(work.max(1)) else {
            return Err(refused(format!(
                "takes more than {WORK_MAX} units of work (bytes, about)"
            )));
        };
        budget.work.set(left);
        if budget.given_up.is_set() {
            return Err(refused("was given up"));
        }
        if Instant::now() >= budget.until {
            return Err(refused(too_long()));
        }
        Ok(())
    })
}

/// Pays for text that is written.
pub(super) fn write(bytes: usize) -> Result<()> {
    spend(bytes as u64)?;
    BUDGET.with(|cell| {
        let budget = cell.borrow();
        let Some(budget) = &*budget else { return Ok(()) };
        let left = budget.text.get().checked_sub(bytes as u64);
        let too_much = || refused(format!("writes more than {TEXT_BYTES_MAX} bytes"));
        budget.text.set(left.ok_or_else(too_much)?);
        Ok(())
    })
}

/// Notes a new namespace.
pub(super) fn note_namespace(value: &Value) -> Result<()> {
    BUDGET.with(|cell| {
        let budget = cell.borrow();
        let Some(budget) = &*budget else { return Ok(()) };
        let mut known = budget.namespaces.borrow_mut();
        if known.len() == NAMESPACES_MAX {
            return Err(refused(format!("more than {NAMESPACES_MAX} namespaces")));
        }
        known.push(value.clone());
        Ok(())
    })
}

fn is_namespace(value: &Value) -> bool {
    BUDGET.with(|cell| {
        let budget = cell.borrow();
        let known = budget.as_ref().map(|budget| budget.namespaces.borrow());
        known.is_some_and(|known| known.iter().any(|other| is_sameas(value, other)))
    })
}

/// How a value is looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    /// Its texts are read.
    Read,
    /// Only its structure is.
    Structure,
    /// The same, and no namespace may be in it: what one holds may change later.
    Plain,
}

/// Length of a list, a map or what can be iterated; 0 for all else.
pub(super) fn length(value: &Value) -> u64 {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            value.len().map_or(1, |n| n as u64)
        }
        _ => 0,
    }
}

/// Pays for going once over the items of a value, or the bytes of a text.
pub(super) fn shallow(value: &Value) -> Result<()> {
    let bytes = value.as_str().map_or(0, str::len) as u64;
    spend(bytes.saturating_add(length(value).saturating_mul(ITEM)))
}

/// Pays for reading all of a value; its size in bytes, and in items.
pub(super) fn deep(value: &Value) -> Result<(u64, u64)> {
    let mut size = (0, 0);
    walk(value, 0, Look::Read, &mut size)?;
    Ok(size)
}

fn walk(value: &Value, depth: usize, look: Look, size: &mut (u64, u64)) -> Result<()> {
    let bytes = value.as_str().map_or(8, |text| text.len() as u64 + 8);
    spend(ITEM + if look == Look::Read { bytes } else { 0 })?;
    *size = (size.0 + bytes, size.1 + 1);
    let kind = value.kind();
    if !matches!(kind, ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(());
    }
    if depth == DEPTH_MAX {
        return Err(refused(format!("a value nested more than {DEPTH_MAX} deep")));
    }
    // Before the first item is made.
    spend(length(value).saturating_mul(ITEM))?;
    if look == Look::Plain && is_namespace(value) {
        return Err(refused("a namespace within a namespace"));
    }
    for item in value.try_iter()? {
        walk(&item, depth + 1, look, size)?;
        if kind == ValueKind::Map {
            walk(&value.get_item(&item)?, depth + 1, look, size)?;
        }
    }
    Ok(())
}

/// Checks a value that a variable is to hold.
pub(super) fn keep(value: &Value) -> Result<()> {
    walk(value, 0, Look::Structure, &mut (0, 0))
}

/// Checks a value that a namespace is to hold.
pub(super) fn store(value: &Value) -> Result<()> {
    walk(value, 0, Look::Plain, &mut (0, 0))
}

/// A list in place of what makes its items whenever it is asked: such things made of others would
/// be as deep as there are operations.
pub(super) fn made(value: Value) -> Result<Value> {
    if value.kind() != ValueKind::Iterable {
        return Ok(value);
    }
    shallow(&value)?;
    let mut items = Vec::new();
    for item in value.try_iter()? {
        spend(ITEM)?;
        items.push(item);
    }
    Ok(Value::from(items))
}
