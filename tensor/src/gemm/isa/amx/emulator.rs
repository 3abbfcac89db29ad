//! Carries out AMX instructions on processors that do not know them, so that the tests run the same code everywhere.
//!
//! Such an instruction raises SIGILL. The handler reads it at the thread's instruction pointer, changes the thread's
//! own tile registers as the processor would, and resumes the thread after it. An instruction that breaks a rule of the
//! configuration, and would be a fault, ends the process.

use std::cell::UnsafeCell;
use std::sync::OnceLock;

/// A register: its rows and the bytes of each that count, and words of 32 bits.
#[derive(Clone, Copy)]
struct Register {
    rows: usize,
    row_bytes: usize,
    words: [[u32; 16]; 16],
}

struct State {
    configured: bool,
    registers: [Register; 8],
}

thread_local! {
    static STATE: UnsafeCell<State> = const {
        let register = Register { rows: 0, row_bytes: 0, words: [[0; 16]; 16] };
        UnsafeCell::new(State { configured: false, registers: [register; 8] })
    };
}

/// An instruction that was carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    Configure,
    Zero {
        register: usize,
    },
    /// Reads rows `stride` bytes apart; `far` for the hint that the lines are not used again soon.
    Load {
        register: usize,
        address: usize,
        stride: isize,
        far: bool,
    },
    Store {
        register: usize,
        address: usize,
        stride: isize,
    },
    Multiply {
        sums: usize,
    },
}

thread_local! {
    static TRACE: UnsafeCell<Option<Vec<Event>>> = const { UnsafeCell::new(None) };
}

/// The instructions that `body` executes on this thread.
pub(crate) fn trace(body: impl FnOnce()) -> Vec<Event> {
    // SAFETY: no other code uses the thread's trace; the handler runs inside instructions of `body` only.
    TRACE.with(|trace| unsafe { *trace.get() = Some(Vec::new()) });
    body();
    // SAFETY: as above.
    TRACE.with(|trace| unsafe { (*trace.get()).take() }).expect("set above")
}

/// Notes that this thread has been given shapes, as `ldtilecfg` reads them. A processor that refuses tile registers to
/// the process still lets it configure them, so that instruction may not trap.
pub(super) fn configured(shapes: &[u8; 64]) {
    // SAFETY: no other code uses the thread's state and trace.
    unsafe {
        STATE.with(|state| (*state.get()).configure(shapes));
        TRACE.with(|trace| {
            if let Some(trace) = &mut *trace.get() {
                trace.push(Event::Configure);
            }
        });
    }
}

/// Carries out the instructions from now on; true if that is possible.
pub(crate) fn install() -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    *INSTALLED.get_or_init(|| {
        // SAFETY: the handler touches only its thread's state and what the instruction says.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()) == 0
        }
    })
}

/// # Safety
/// Called by the system, with the state of a thread that has met an instruction that the processor does not know.
unsafe extern "C" fn handle(
    signal: libc::c_int,
    _: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the system gives the context; code can be read where the thread stands; no other code uses the
    // thread's tile registers.
    unsafe {
        let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        let length = STATE.with(|state| Instruction::read(registers).carry_out(&mut *state.get()));
        match length {
            Some(length) => registers[libc::REG_RIP as usize] += length as i64,
            // Not one of ours: the thread meets it again, and the process ends as it would have.
            None => {
                libc::signal(signal, libc::SIG_DFL);
            }
        }
    }
}

/// An instruction with a three-byte VEX prefix of the 0F38 map, if it is one.
struct Instruction {
    is_vex: bool,
    /// 0 none, 1 66, 2 F3, 3 F2.
    prefix: u8,
    opcode: u8,
    /// The registers that it names: ModRM.reg, VEX.vvvv, ModRM.rm.
    reg: usize,
    extra: usize,
    rm: usize,
    /// The address of its memory operand, and the bytes from one row to the next.
    memory: Option<(*mut u8, isize)>,
    length: usize,
}

impl Instruction {
    /// # Safety
    /// The registers are those of a thread that stands before an instruction.
    unsafe fn read(registers: &[i64; 23]) -> Instruction {
        const NAMES: [libc::c_int; 16] = [
            libc::REG_RAX,
            libc::REG_RCX,
            libc::REG_RDX,
            libc::REG_RBX,
            libc::REG_RSP,
            libc::REG_RBP,
            libc::REG_RSI,
            libc::REG_RDI,
            libc::REG_R8,
            libc::REG_R9,
            libc::REG_R10,
            libc::REG_R11,
            libc::REG_R12,
            libc::REG_R13,
            libc::REG_R14,
            libc::REG_R15,
        ];
        let register = |number: u8| registers[NAMES[usize::from(number)] as usize];
        let code = registers[libc::REG_RIP as usize] as *const u8;
        // SAFETY: an instruction that was fetched is readable, and no more is read than it has.
        let byte = |i: usize| unsafe { *code.add(i) };
        let is_vex = byte(0) == 0xc4 && byte(1) & 0x1f == 2 && byte(2) & 0x84 == 0;
        if !is_vex {
            let (prefix, opcode, memory) = (0, 0, None);
            return Instruction {
                is_vex,
                prefix,
                opcode,
                reg: 0,
                extra: 0,
                rm: 0,
                memory,
                length: 0,
            };
        }
        let (extend_x, extend_b) = (!byte(1) >> 6 & 1, !byte(1) >> 5 & 1);
        let (opcode, modrm) = (byte(3), byte(4));
        let (mode, rm) = (modrm >> 6, modrm & 7);
        let mut length = 5;
        let mut memory = None;
        if mode != 3 {
            let (mut address, mut stride) = (0, 0);
            let mut base = (rm, true);
            if rm == 4 {
                let sib = byte(5);
                length += 1;
                base = (sib & 7, sib & 7 != 5 || mode != 0);
                let index = sib >> 3 & 7 | extend_x << 3;
                stride = if index == 4 { 0 } else { register(index) << (sib >> 6) };
            }
            assert!(mode != 0 || rm != 5, "an address beside the code");
            if base.1 {
                address += register(base.0 | extend_b << 3);
            }
            match mode {
                1 => {
                    address += i64::from(byte(length) as i8);
                    length += 1;
                }
                2 => {
                    let bytes = std::array::from_fn(|i| byte(length + i));
                    address += i64::from(i32::from_le_bytes(bytes));
                    length += 4;
                }
                _ => assert!(base.1, "an address without a base"),
            }
            memory = Some((address as *mut u8, stride as isize));
        }
        Instruction {
            is_vex,
            prefix: byte(2) & 3,
            opcode,
            reg: usize::from(modrm >> 3 & 7),
            extra: usize::from(!byte(2) >> 3 & 15),
            rm: usize::from(rm),
            memory,
            length,
        }
    }

    /// Does what the instruction says and returns its length, if it is known here.
    ///
    /// # Safety
    /// Memory that it names is there.
    unsafe fn carry_out(&self, state: &mut State) -> Option<usize> {
        if !self.is_vex {
            return None;
        }
        let Instruction { reg, extra, rm, .. } = *self;
        let event = match (self.opcode, self.prefix, self.memory) {
            (0x49, 3, None) => Some(Event::Zero { register: reg }),
            (0x4b, prefix @ (1 | 3), Some((from, stride))) => {
                Some(Event::Load { register: reg, address: from.addr(), stride, far: prefix == 1 })
            }
            (0x4b, 2, Some((to, stride))) => {
                Some(Event::Store { register: reg, address: to.addr(), stride })
            }
            (0x5c, 2, None) => Some(Event::Multiply { sums: reg }),
            _ => None,
        };
        // SAFETY: no other code uses the thread's trace; no allocation is under way where a tile instruction stands.
        TRACE.with(|trace| unsafe {
            if let (Some(trace), Some(event)) = (&mut *trace.get(), event) {
                trace.push(event);
            }
        });
        // SAFETY: the caller's promise.
        unsafe {
            match (self.opcode, self.prefix, self.memory) {
                (0x49, 0, Some((shapes, _))) => state.configure(&*shapes.cast::<[u8; 64]>()),
                (0x49, 0, None) => state.configured = false,
                (0x49, 3, None) => state.shaped(reg).words = [[0; 16]; 16],
                (0x4b, 1 | 3, Some((from, stride))) => state.shaped(reg).load(from, stride),
                (0x4b, 2, Some((to, stride))) => state.shaped(reg).store(to, stride),
                (0x5c, 2, None) => state.multiply_add(reg, rm, extra),
                _ => return None,
            }
        }
        Some(self.length)
    }
}

impl Register {
    unsafe fn load(&mut self, from: *const u8, stride: isize) {
        self.words = [[0; 16]; 16];
        for (i, words) in self.words.iter_mut().enumerate().take(self.rows) {
            // SAFETY: the caller's promise: memory holds the register's shape.
            unsafe {
                let row = from.wrapping_offset(i as isize * stride);
                std::ptr::copy_nonoverlapping(row, words.as_mut_ptr().cast(), self.row_bytes);
            }
        }
    }

    unsafe fn store(&self, to: *mut u8, stride: isize) {
        for (i, words) in self.words.iter().enumerate().take(self.rows) {
            // SAFETY: as above.
            unsafe {
                let row = to.wrapping_offset(i as isize * stride);
                std::ptr::copy_nonoverlapping(words.as_ptr().cast(), row, self.row_bytes);
            }
        }
    }
}

impl State {
    fn configure(&mut self, bytes: &[u8; 64]) {
        assert_eq!(bytes[0], 1, "palette");
        assert!(bytes[1..16].iter().all(|&byte| byte == 0), "reserved bytes");
        assert!(
            bytes[32..48].iter().chain(&bytes[56..]).all(|&byte| byte == 0),
            "registers beyond 7"
        );
        for (i, register) in self.registers.iter_mut().enumerate() {
            let row_bytes = usize::from(u16::from_le_bytes([bytes[16 + 2 * i], bytes[17 + 2 * i]]));
            let rows = usize::from(bytes[48 + i]);
            assert!(
                rows <= 16 && row_bytes <= 64,
                "register {i}: {rows} rows of {row_bytes} bytes"
            );
            assert_eq!(rows == 0, row_bytes == 0, "register {i}: {rows} rows of {row_bytes} bytes");
            *register = Register { rows, row_bytes, words: [[0; 16]; 16] };
        }
        self.configured = true;
    }

    /// A register that has a shape.
    fn shaped(&mut self, number: usize) -> &mut Register {
        assert!(self.configured, "no shapes");
        let register = &mut self.registers[number];
        assert!(register.rows > 0, "register {number} has no shape");
        register
    }

    /// `tdpbf16ps`: products of lower and of upper halves are summed apart, then all is added.
    ///
    /// # Safety
    /// The processor has AVX-512.
    #[target_feature(enable = "avx512f,fma")]
    unsafe fn multiply_add(&mut self, sums: usize, a: usize, b: usize) {
        let (a, b) = (*self.shaped(a), *self.shaped(b));
        let sums = self.shaped(sums);
        assert!(sums.rows == a.rows && sums.row_bytes == b.row_bytes, "shapes of sums");
        assert!(a.row_bytes == 4 * b.rows, "shapes of factors");
        let halves = |word: u32| [word << 16, word & 0xffff_0000].map(f32::from_bits);
        for (sums, a) in sums.words.iter_mut().zip(&a.words).take(a.rows) {
            let mut parts = [[0.0_f32; 2]; 16];
            for (a, b) in a.iter().zip(&b.words).take(b.rows) {
                let [low, high] = halves(*a);
                for (part, b) in parts.iter_mut().zip(b) {
                    let [b_low, b_high] = halves(*b);
                    *part = [low.mul_add(b_low, part[0]), high.mul_add(b_high, part[1])];
                }
            }
            for (sum, [low, high]) in sums.iter_mut().zip(parts) {
                *sum = (f32::from_bits(*sum) + (low + high)).to_bits();
            }
        }
    }
}
