-- Stores a part of a record that is too long for one step, before the put that needs it.
-- 1  incarnation of the attempt that the record belongs to
-- 2  name of the part, 16 bytes
-- 3  the part
-- Reply    OK | SAME (stored already) | FROZEN | RETIRED (also: another attempt, or no rollout)
-- Repeat   safe: SAME
local state, err = load_state()
if err then return err end
if not state or state.incarnation ~= arg(1) or state.status == 'retired' then
  return reply('RETIRED', state)
end
local name, part = arg(2), arg(3)
if redis.call('HEXISTS', key, 'b:' .. name) == 1 then return reply('SAME', state) end
if state.status == 'frozen' then return reply('FROZEN', state) end
state.blocks = state.blocks + 1
state.bytes = state.bytes + #part
local trace = next_step(state)
write(state, trace, '1:' .. name .. 'p:', 'b:' .. name, part)
return reply('OK', state)
