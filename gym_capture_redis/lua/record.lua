-- Adds the row of a call that was staged to a ledger.
-- 1  incarnation of the attempt that the row belongs to
-- 2  call
-- 3  the row
-- Reply    OK | SAME (this very row is there) | OTHER_ROW (another one is, or the call failed before; nothing changed) |
--          RETIRED | CHANGED (another attempt, or none; nothing changed)
-- Repeat   safe: SAME
local field = 'r:' .. arg(2)
local state, err, there = load_state(field, 'x:' .. arg(2))
if err then return err end
if state and state.status == 'retired' then return reply('RETIRED', state) end
if not state or state.incarnation ~= arg(1) then return reply('CHANGED', state) end
if there[1] then return reply(there[1] == arg(3) and 'SAME' or 'OTHER_ROW', state) end
if there[2] then return reply('OTHER_ROW', state) end
state.version = state.version + 1
state.records = state.records + 1
state.bytes = state.bytes + #arg(3)
local trace = next_step(state)
write(state, trace, '0:' .. field, field, arg(3))
return reply('OK', state)
