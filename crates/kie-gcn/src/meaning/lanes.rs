//! How an instruction works on all lanes: what stands in the macros' places is done to each.

/// One word from one.
macro_rules! m1 {
    (|$a:ident| $e:expr) => {
        |w, i, _| {
            let x = w.lanes(i, 1);
            let mut out = [0_u32; crate::wave::LANES];
            for k in 0..crate::wave::LANES {
                let $a = x[k];
                out[k] = $e;
            }
            w.put(i, &out);
            crate::wave::Next::Go
        }
    };
}
/// One word from two; `i` is the instruction, where it matters.
macro_rules! m2 {
    (|$a:ident, $b:ident| $e:expr) => {
        crate::meaning::lanes::m2!(|$a, $b, _i| $e)
    };
    (|$a:ident, $b:ident, $i:ident| $e:expr) => {
        |w, $i, _| {
            let (x, y) = (w.lanes($i, 1), w.lanes($i, 2));
            let mut out = [0_u32; crate::wave::LANES];
            for k in 0..crate::wave::LANES {
                let ($a, $b) = (x[k], y[k]);
                out[k] = $e;
            }
            w.put($i, &out);
            crate::wave::Next::Go
        }
    };
}
/// One word from three.
macro_rules! m3 {
    (|$a:ident, $b:ident, $c:ident| $e:expr) => {
        |w, i, _| {
            let (x, y, z) = (w.lanes(i, 1), w.lanes(i, 2), w.lanes(i, 3));
            let mut out = [0_u32; crate::wave::LANES];
            for k in 0..crate::wave::LANES {
                let ($a, $b, $c) = (x[k], y[k], z[k]);
                out[k] = $e;
            }
            w.put(i, &out);
            crate::wave::Next::Go
        }
    };
}
/// One float from as many as are named, from operands 1 on, or from operand 0 on where the result
/// is added to what was there.
macro_rules! floats {
    ([$($n:literal $a:ident),+] $e:expr) => {
        |w, i, _| {
            $(let $a = w.lanes(i, $n);)+
            let mut out = [0_u32; crate::wave::LANES];
            for k in 0..crate::wave::LANES {
                $(let $a = f32::from_bits($a[k]);)+
                out[k] = f32::to_bits($e);
            }
            crate::meaning::float::finish(i, &mut out);
            w.put(i, &out);
            crate::wave::Next::Go
        }
    };
}

pub(crate) use {floats, m1, m2, m3};
