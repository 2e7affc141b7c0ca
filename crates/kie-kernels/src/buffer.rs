//! Bytes that a device reads and nobody writes: weights.

use std::sync::Arc;

/// Bytes that never change and stay where they are, such as a mapped file.
pub trait HostBytes: Send + Sync + 'static {
    /// The bytes.
    fn bytes(&self) -> &[u8];
}

impl<T: AsRef<[u8]> + Send + Sync + 'static> HostBytes for T {
    fn bytes(&self) -> &[u8] {
        self.as_ref()
    }
}

/// Read-only bytes on a device, kept alive by their owner.
#[derive(Clone)]
pub struct Buffer {
    /// First byte, in the device's address space.
    address: *const u8,
    /// Length in bytes.
    len: usize,
    /// Mapped file, heap block or device allocation.
    _owner: Arc<dyn HostBytes>,
}

// SAFETY: the bytes are immutable for the life of `_owner`, which is itself Send + Sync.
unsafe impl Send for Buffer {}
// SAFETY: as above; a Buffer hands out shared references only.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Host bytes, in place.
    pub fn in_place(owner: Arc<dyn HostBytes>) -> Self {
        let bytes = owner.bytes();
        Self { address: bytes.as_ptr(), len: bytes.len(), _owner: owner }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes, for a runner whose address space is the host's.
    pub(crate) fn host(&self) -> &[u8] {
        // SAFETY: `in_place` took address and length from the owner that `self` keeps alive.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }
}
