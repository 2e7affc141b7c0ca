//! What layers that predict further tokens take in.

use super::Walk;
use crate::abi::MtpIn;
use crate::matrix::row_to_f32;

impl Walk<'_> {
    pub(super) fn mtp_in(&self, step: &MtpIn) {
        let (pass, hidden) = (self.pass, self.dims().hidden as usize);
        let end = step.end_norms[usize::from(pass.after_drafts)];
        for column in self.mine(self.columns.len()) {
            let at = self.at(0, column, 2 * hidden);
            // SAFETY: one member a column.
            let out = unsafe { pass.normed.write(at..at + 2 * hidden) };
            let (embedding, stream) = out.split_at_mut(hidden);
            let scratch = &mut self.scratch().stream[..];
            let token = self.columns[column].token as usize;
            row_to_f32(&pass.matrix(step.table, 0), token, scratch);
            self.normalise(pass.constant(step.embedding_norm), 0, scratch, embedding);
            let input = self.read(step.input, 0, pass.from[column], 0..hidden);
            self.normalise(pass.constant(end), 0, input, scratch);
            self.normalise(pass.constant(step.hidden_norm), 0, scratch, stream);
        }
        self.barrier.wait();
        self.pack_input(&[step.weight], 2 * hidden, 1, |_| {
            &self.normed(0, 2 * hidden)[self.decode * 2 * hidden..]
        });
        let rows = self.rows(step.partition);
        let out = self.output(&pass.raw, self.at(0, 0, hidden) + rows.start, rows.len(), hidden);
        let matrix = pass.matrix(step.weight, 0);
        self.multiply(&matrix, rows.clone(), self.normed(0, 2 * hidden), 0, out);
        for column in 0..self.columns.len() {
            let at = self.at(0, column, hidden);
            // SAFETY: this member's own rows.
            let made = unsafe { pass.raw.read(at + rows.start..at + rows.end) };
            for lane in 0..self.dims().lanes as usize {
                self.write(step.output, lane, column, rows.clone()).copy_from_slice(made);
            }
        }
    }
}
