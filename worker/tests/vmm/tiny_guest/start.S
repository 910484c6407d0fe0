/* Entry by Linux's 64-bit boot protocol, and interrupts. Owns the stack; everything else is in guest.c. */

    .section .text.start, "ax"
    .globl _start
_start:
    cli
    lea stack_end(%rip), %rsp
    xor %ebp, %ebp
    /* RSI holds the boot parameters. */
    mov %rsi, %rdi
    call guest
1:  cli
    hlt
    jmp 1b

/* Any interrupt of the two controllers: it only ends a `hlt`. */
    .globl interrupt
interrupt:
    push %rax
    mov $0x20, %al
    out %al, $0xa0
    out %al, $0x20
    pop %rax
    iretq

/* Anything else is the end. */
    .globl fault
fault:
    mov (%rsp), %rdi
    mov 8(%rsp), %rsi
    call broken
    jmp 1b

/* Waits for an interrupt; none between the two instructions. */
    .globl wait_interrupt
wait_interrupt:
    sti
    hlt
    cli
    ret

    .bss
    .balign 16
    .skip 16384
stack_end:
    .section .note.GNU-stack, "", @progbits
