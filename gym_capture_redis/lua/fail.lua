-- Adds to a ledger that a call failed.
-- 1  incarnation to give the ledger if it is new
-- 2  incarnation of the attempt that is meant, or '' for whichever is there
-- 3  call
-- 4  why: a JSON string without line breaks
-- Reply    OK | SAME (it is there, for this very reason) | RETIRED | CHANGED (another attempt, or none; nothing changed)
-- Repeat   safe: SAME
local expected, field, reason = arg(2), 'x:' .. arg(3), arg(4)
local state, err, known = load_state(field)
if err then return err end
if state and state.status == 'retired' then return reply('RETIRED', state) end
if expected ~= '' and (not state or state.incarnation ~= expected) then return reply('CHANGED', state) end
local reasons = known[1]
if reasons and string.find('\n' .. reasons .. '\n', '\n' .. reason .. '\n', 1, true) then
  return reply('SAME', state)
end
state = state or new_state(arg(1))
keep(state)
state.version = state.version + 1
if not reasons then state.failures = state.failures + 1 end
local trace = next_step(state)
write(state, trace, '0:' .. field, field, reasons and reasons .. '\n' .. reason or reason)
return reply('OK', state)
