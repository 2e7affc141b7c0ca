//! Memory that the members of a team read and write in disjoint parts.
//!
//! Members run at the same time on one [`Field`], so no reference to the whole of it may exist
//! while they do: every element is a cell, and a reference is made to exactly the elements that a
//! member reads or writes. What one member writes lies, for a matrix product or for attention, in
//! one piece a column, with other members' pieces between them: that is [`Columns`].

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::Range;

/// Numbers that members share; see the module's text.
pub struct Field<T>(Box<[UnsafeCell<T>]>);

// SAFETY: members touch elements by `read`, `write` and `columns` alone, whose callers promise that
// what is written by one is touched by nobody else before the next barrier.
unsafe impl<T: Send + Sync> Sync for Field<T> {}

impl<T: Copy + Default> Field<T> {
    /// Zeros, which the allocator hands out untouched.
    pub fn new(len: usize) -> Self {
        Self::of(vec![T::default(); len])
    }

    /// Room for at least `len` elements; what was there is lost if there was less.
    pub fn reserve(&mut self, len: usize) {
        if len > self.0.len() {
            *self = Self::new(len);
        }
    }
}

impl<T> Field<T> {
    /// These elements.
    pub fn of(all: Vec<T>) -> Self {
        let all = Box::into_raw(all.into_boxed_slice());
        // SAFETY: a cell has the layout of what it holds, and the box is given up for the new one.
        Self(unsafe { Box::from_raw(all as *mut [UnsafeCell<T>]) })
    }

    /// All elements, for one who has the field alone.
    pub fn all(&mut self) -> &mut [T] {
        let len = self.0.len();
        // SAFETY: `&mut self`: nobody else has the field; a cell has the layout of its content.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len) }
    }

    /// How many elements there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The first of `range`'s elements, which exist.
    fn first(&self, range: &Range<usize>) -> *mut T {
        let all = self.0.len();
        assert!(range.start <= range.end && range.end <= all, "{range:?} of {all}");
        UnsafeCell::raw_get(self.0[range.start..].as_ptr())
    }

    /// # Safety
    /// Nobody writes `range` before the next barrier.
    pub unsafe fn read(&self, range: Range<usize>) -> &[T] {
        // SAFETY: in bounds (`first`); that nobody writes is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.first(&range), range.len()) }
    }

    /// # Safety
    /// Nobody but the caller reads or writes `range` before the next barrier, and the caller has
    /// no other reference to any of it while he holds this one.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn write(&self, range: Range<usize>) -> &mut [T] {
        // SAFETY: in bounds (`first`); that nobody else is there is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.first(&range), range.len()) }
    }

    /// `count` pieces of `width` elements, the first at `at`, each `stride` behind the one before.
    ///
    /// # Safety
    /// As [`Field::write`], of the pieces; what lies between them may be anybody's.
    pub unsafe fn columns(
        &self,
        at: usize,
        width: usize,
        stride: usize,
        count: usize,
    ) -> Columns<'_, T> {
        let first = self.first(&(at..at + span(width, stride, count)));
        Columns { first, width, stride, count, owner: PhantomData }
    }
}

/// Elements from the first of so many pieces to the last one's end.
fn span(width: usize, stride: usize, count: usize) -> usize {
    assert!(count <= 1 || stride >= width, "pieces of {width} overlap at a stride of {stride}");
    if count == 0 {
        return 0;
    }
    (count - 1) * stride + width
}

/// Pieces of equal width at equal distances, each the holder's own; see the module's text.
pub struct Columns<'a, T> {
    first: *mut T,
    width: usize,
    stride: usize,
    count: usize,
    owner: PhantomData<&'a mut [T]>,
}

impl<'a, T> Columns<'a, T> {
    /// `count` pieces of `width` elements of a slice, `stride` apart, the first at its start.
    ///
    /// # Panics
    /// When the slice is too short, or pieces overlap.
    pub fn of(all: &'a mut [T], width: usize, stride: usize, count: usize) -> Self {
        let wanted = span(width, stride, count);
        assert!(all.len() >= wanted, "{count} pieces need {wanted} elements, got {}", all.len());
        Self { first: all.as_mut_ptr(), width, stride, count, owner: PhantomData }
    }

    /// One piece: the whole slice.
    pub fn one(all: &'a mut [T]) -> Self {
        let width = all.len();
        Self::of(all, width, width, 1)
    }

    /// How many pieces there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Elements of a piece.
    pub fn width(&self) -> usize {
        self.width
    }

    /// One piece.
    ///
    /// # Panics
    /// When there is no such piece.
    #[inline(always)]
    pub fn piece(&mut self, index: usize) -> &mut [T] {
        assert!(index < self.count, "piece {index} of {}", self.count);
        // SAFETY: the piece exists, is the holder's own, and is borrowed from the holder.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(index * self.stride), self.width) }
    }

    /// The same pieces for a shorter time: `columns` of them, of each the elements `part`.
    ///
    /// # Panics
    /// When a piece or a part of it does not exist.
    pub fn some(&mut self, columns: Range<usize>, part: Range<usize>) -> Columns<'_, T> {
        assert!(columns.start <= columns.end && columns.end <= self.count, "pieces {columns:?}");
        assert!(part.start <= part.end && part.end <= self.width, "elements {part:?}");
        let first = self.first.wrapping_add(columns.start * self.stride + part.start);
        Columns {
            first,
            width: part.len(),
            stride: self.stride,
            count: columns.len(),
            owner: PhantomData,
        }
    }
}

#[cfg(test)]
#[allow(clippy::undocumented_unsafe_blocks, clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn pieces_interleave_with_those_of_others() {
        let field = Field::<u32>::new(12);
        let (mut left, mut right) =
            unsafe { (field.columns(0, 2, 4, 3), field.columns(2, 2, 4, 3)) };
        for column in 0..3 {
            left.piece(column).fill(1);
            right.piece(column).fill(2);
        }
        right.some(1..2, 1..2).piece(0)[0] = 3;
        assert_eq!(unsafe { field.read(0..12) }, [1, 1, 2, 2, 1, 1, 2, 3, 1, 1, 2, 2]);
    }

    #[test]
    fn what_lies_outside_is_refused() {
        let refused = |body: &dyn Fn()| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_err();
        };
        let field = Field::<u8>::new(8);
        refused(&|| assert!(unsafe { field.read(4..9) }.is_empty()));
        refused(&|| assert_eq!(unsafe { field.columns(1, 2, 3, 3) }.count(), 3));
        refused(&|| assert_eq!(unsafe { field.columns(0, 3, 2, 2) }.count(), 2));
        refused(&|| assert_eq!(Columns::of(&mut [0; 4], 2, 3, 2).count(), 2));
        refused(&|| Columns::one(&mut [0; 4]).piece(1)[0] = 1);
        refused(&|| assert_eq!(Columns::one(&mut [0; 4]).some(0..1, 3..5).width(), 2));
    }
}
