//! The project's own small kernels.

use kie_kernels::mono::echo::round_trips;

use super::*;

#[test]
fn the_host_answers_a_running_kernel() {
    let gcn = Gcn::open("gcn:blocks=1").unwrap();
    // The emulated clock goes on while a busy machine keeps the host's thread from answering.
    match round_trips(&gcn, 20, Duration::from_secs(600)) {
        Ok(times) => assert!(times.len() == 20 && times.iter().all(|us| *us > 0.0), "{times:?}"),
        Err(Error::BackendMissing { .. }) => {}
        Err(error) => panic!("{error}"),
    }
}
