//! What NVML tells of NVLinks, where there is one.

use nvml_wrapper::Nvml;

/// Most links of a GPU that NVML numbers.
const LINKS_MAX: u32 = 18;

/// NVLinks that are up on the GPU at a PCI address; `None` where nobody can tell.
pub(crate) fn active_links(bus: &str) -> Option<u32> {
    let nvml = Nvml::init().ok()?;
    let device = nvml.device_by_pci_bus_id(bus).ok()?;
    let up = |link: &u32| device.link_wrapper_for(*link).is_active().unwrap_or(false);
    Some((0..LINKS_MAX).filter(up).count() as u32)
}
