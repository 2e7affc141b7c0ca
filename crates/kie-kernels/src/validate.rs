//! The only door to a device: a [`ValidProgram`] is a program whose every index is in bounds, whose
//! every vector is written before it is read, and whose rows are each owned by exactly one block.

use crate::abi::{Op, Program, Step, Tensor, NONE};
use crate::device::Buffer;
use crate::error::{Error, Result};

/// A program that passed [`validate`]; nobody else can make one.
#[derive(Debug, Clone)]
pub struct ValidProgram(Program);

impl ValidProgram {
    /// The program.
    pub fn program(&self) -> &Program {
        &self.0
    }
}

/// Checks a program against the buffers it will be started with.
///
/// # Errors
/// [`Error::InvalidProgram`] names the step and what is wrong with it.
pub fn validate(program: Program, buffers: &[Buffer]) -> Result<ValidProgram> {
    let lengths: Vec<u64> = buffers.iter().map(|b| b.len() as u64).collect();
    let checker = Checker { program: &program, lengths: &lengths };
    checker.sizes()?;
    for (index, tensor) in program.tensors.iter().enumerate() {
        checker.tensor(index, tensor)?;
    }
    let mut written = vec![false; program.vectors.len()];
    for (index, step) in program.steps.iter().enumerate() {
        checker.step(index, step, &mut written)?;
    }
    Ok(ValidProgram(program))
}

struct Checker<'a> {
    program: &'a Program,
    lengths: &'a [u64],
}

fn refuse<T>(step: usize, detail: String) -> Result<T> {
    Err(Error::InvalidProgram { step, detail })
}

impl Checker<'_> {
    fn sizes(&self) -> Result<()> {
        let d = &self.program.dims;
        let sizes = [d.hidden, d.lanes, d.heads, d.kv_heads, d.head_dim, d.ffn, d.vocab, d.slots];
        if sizes.contains(&0) || d.max_positions == 0 || self.program.blocks == 0 {
            return refuse(usize::MAX, format!("a size is zero: {d:?}"));
        }
        if d.columns <= d.slots {
            return refuse(usize::MAX, format!("{} columns for {} slots", d.columns, d.slots));
        }
        if !d.heads.is_multiple_of(d.kv_heads) || !d.head_dim.is_multiple_of(2) {
            return refuse(usize::MAX, format!("heads do not divide: {d:?}"));
        }
        match self.program.tensors.get(self.program.rope as usize) {
            Some(rope) if rope.cols == d.head_dim / 2 => Ok(()),
            found => refuse(usize::MAX, format!("rotary table is {found:?}")),
        }
    }

    fn tensor(&self, index: usize, t: &Tensor) -> Result<()> {
        let inside = |buffer: u32, offset: u64, bytes: u64| {
            let end = offset.checked_add(bytes);
            let len = self.lengths.get(buffer as usize).copied();
            matches!((end, len), (Some(end), Some(len)) if end <= len)
        };
        if !inside(t.buffer, t.offset, t.lane_bytes() * u64::from(t.lanes)) {
            return refuse(usize::MAX, format!("tensor {index} leaves its buffer: {t:?}"));
        }
        if !t.cols.is_multiple_of(t.encoding.codes.row().numbers) {
            return refuse(usize::MAX, format!("rows of tensor {index} are no whole bytes: {t:?}"));
        }
        let beside = [(t.scale_offset, t.scale_bytes()), (t.zero_offset, t.zero_bytes())];
        for (offset, bytes) in beside {
            let bytes = bytes * u64::from(t.lanes);
            if bytes > 0 && !inside(t.scale_buffer, offset, bytes) {
                return refuse(usize::MAX, format!("scales of tensor {index} leave their buffer"));
            }
        }
        Ok(())
    }

    fn step(&self, index: usize, step: &Step, written: &mut [bool]) -> Result<()> {
        let tensors = self.program.tensors.len() as u32;
        let named = step.weights.iter().chain(&step.biases).chain(&step.head_norms);
        if let Some(bad) = named.chain([&step.norm]).find(|t| **t != NONE && **t >= tensors) {
            return refuse(index, format!("tensor {bad} of {tensors}"));
        }
        let reads: &[u32] = match step.op {
            Op::Embed => &[],
            Op::Project if step.mix_delay > 0 => &[step.input, step.output, step.others],
            Op::Project => &[step.input, step.output],
            Op::Qkv | Op::Attend | Op::GateUp | Op::Head | Op::Sample => &[step.input],
        };
        for v in reads {
            if !written.get(*v as usize).copied().unwrap_or(false) {
                return refuse(index, format!("vector {v} is read before it is written"));
            }
        }
        for v in [step.output, step.partial] {
            match written.get_mut(v as usize) {
                Some(flag) => *flag = true,
                None if v == NONE => {}
                None => return refuse(index, format!("vector {v} does not exist")),
            }
        }
        self.matrices(index, step)?;
        self.rows(index, step)
    }

    fn matrices(&self, index: usize, step: &Step) -> Result<()> {
        let d = &self.program.dims;
        let (q, kv) = (d.heads * d.head_dim, d.kv_heads * d.head_dim);
        let wanted: &[(u32, u32)] = match step.op {
            Op::Embed => &[(d.vocab, d.hidden)],
            Op::Qkv => &[(q, d.hidden), (kv, d.hidden), (kv, d.hidden)],
            Op::GateUp => &[(d.ffn, d.hidden), (d.ffn, d.hidden)],
            Op::Project => {
                let width = self.program.vectors[step.input as usize].width;
                &[(d.hidden, width)]
            }
            Op::Attend | Op::Head | Op::Sample => &[],
        };
        for (tensor, (rows, cols)) in step.weights.iter().zip(wanted) {
            let found = self.program.tensors.get(*tensor as usize).map(|t| (t.rows, t.cols));
            if found != Some((*rows, *cols)) {
                return refuse(index, format!("matrix of {rows} x {cols} wanted, got {found:?}"));
            }
        }
        Ok(())
    }

    /// The split covers every row once: it rises from 0 to the number of rows.
    fn rows(&self, index: usize, step: &Step) -> Result<()> {
        let d = &self.program.dims;
        let rows = match step.op {
            Op::Embed | Op::Attend | Op::Sample => return Ok(()),
            Op::Qkv => d.lanes * (d.heads + 2 * d.kv_heads),
            Op::GateUp => d.lanes * d.ffn,
            Op::Project => d.hidden,
            Op::Head => d.vocab,
        };
        let first = step.split as usize;
        let split = self.program.splits.get(first..=first + self.program.blocks as usize);
        let covers = split.is_some_and(|s| {
            s[0] == 0 && s[s.len() - 1] == rows && s.windows(2).all(|w| w[0] <= w[1])
        });
        if !covers {
            return refuse(index, format!("split {split:?} does not cover {rows} rows"));
        }
        Ok(())
    }
}
