//! Measuring from inside the kernel, on the simulator: every number is there and they add up. What
//! they are means something on a GPU only.

use std::time::Duration;

use kie_core::engine::Engine;
use kie_core::measure::{Measured, Work};
use kie_core::request::EngineConfig;
use kie_core::Error;
use kie_kernels::mono::echo::round_trips;
use kie_kernels::sim::Sim;

use super::fixture;

const WORK: Work = Work { prompt_tokens: 5, tokens: 4, runs: 2 };

fn measure(device: &str) -> kie_core::Result<Measured> {
    Engine::builder(fixture("laneformer_d2")).device(device).measure(WORK)
}

#[test]
fn a_step_is_told_phase_by_phase() {
    for device in ["sim:seed=1,blocks=4", "sim:seed=2,warp=64,blocks=4,ranks=2"] {
        let found = measure(device).unwrap();
        for steps in [&found.full, &found.trace, &found.stream_only, &found.exchange_only] {
            assert_eq!(steps.len(), WORK.runs, "{device}");
            assert!(steps.iter().all(|run| run.len() == WORK.tokens), "{device}: {steps:?}");
            assert!(steps.iter().flatten().all(|us| *us > 0.0), "{device}: {steps:?}");
        }
        let several = device.contains("ranks=2");
        assert_eq!(found.alone.len(), if several { WORK.runs } else { 0 }, "{device}");
        assert!(found.alone.iter().all(|run| run.len() == WORK.tokens), "{device}");
        let all = found.trace.iter().flatten();
        let step = all.clone().sum::<f64>() / all.count() as f64;
        let sum: f64 = found.phases.iter().map(|p| p.us_mean).sum();
        assert!((sum / step - 1.0).abs() < 0.1, "{device}: phases take {sum} of {step} us");
        for phase in &found.phases {
            let ordered = phase.us_min <= phase.us_mean && phase.us_mean <= phase.us_max;
            assert!(ordered && phase.us_mean > 0.0, "{device}: {phase:?}");
        }
        // Padding makes it more, a second device half of it.
        let bytes: u64 = found.phases.iter().map(|p| p.bytes).sum();
        let ranks = if several { 2 } else { 1 };
        assert!(bytes * ranks >= found.bytes_per_token, "{device}: {bytes} of {found:?}");
    }
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let error = measure("cpu").unwrap_err();
    assert!(matches!(error, Error::NoDevice { .. }), "{error}");
    assert!(error.to_string().contains("cuda:0"), "{error}");
    let none = Work { runs: 0, ..WORK };
    let error = Engine::builder(fixture("llama")).measure(none).unwrap_err();
    assert!(matches!(error, Error::InvalidRequest(_)), "{error}");
}

#[test]
fn the_host_answers_every_token() {
    use kie_core::measure::echo;
    let config = |device: &str| EngineConfig { device: device.into(), ..EngineConfig::default() };
    for device in ["sim", "sim:warp=64"] {
        let times = echo(&config(device), 50).unwrap();
        assert_eq!(times.len(), 50, "{device}");
        assert!(times.iter().all(|us| *us > 0.0), "{device}: {times:?}");
    }
    let error = echo(&config("cpu"), 50).unwrap_err();
    assert!(matches!(error, Error::NoDevice { .. }), "{error}");
}

#[test]
fn a_host_that_does_not_answer_is_told() {
    let machine = Sim::open("sim").unwrap();
    let error = round_trips(&machine, 50, Duration::from_nanos(1)).unwrap_err();
    let kie_kernels::Error::Hang(detail) = &error else { panic!("{error}") };
    // A machine that is held up behind its first words finds them answered.
    assert!(detail.starts_with("round trip ") && detail.contains(" of 50 took"), "{detail}");
}
